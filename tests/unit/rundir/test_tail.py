import json
import shutil

from helpers import runs

from llmtrain.rundir.record import Tail


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def steps(found):
    return [line["step"] for line in found]


def test_each_line_is_read_once_and_a_torn_one_when_it_is_whole(tmp_path):
    path = runs.write_run(tmp_path, [runs.train_line(1)]) / "metrics.jsonl"
    tail = Tail(tmp_path)
    found, again = tail.lines()
    assert (steps(found), again) == ([1], True)
    text = json.dumps(runs.train_line(2))
    append(path, text[:50])
    assert tail.lines() == ([], False)
    append(path, text[50:] + "\n\0\n[1]\n")
    found, again = tail.lines()
    assert (steps(found), again) == ([2], False)
    assert tail.unread == 2


def test_a_file_that_shrank_was_replaced_or_copied_over_is_read_again(tmp_path):
    path = runs.write_run(tmp_path, [runs.train_line(n) for n in (1, 2, 3)]) / "metrics.jsonl"
    tail = Tail(tmp_path)
    tail.lines()
    path.write_text(json.dumps(runs.train_line(1)) + "\n")  # the same file, shorter
    assert (steps((read := tail.lines())[0]), read[1]) == ([1], True)
    other = tmp_path / "other"
    other.write_text("".join(json.dumps(runs.train_line(n)) + "\n" for n in (1, 2, 3, 4)))
    other.replace(path)
    assert (steps((read := tail.lines())[0]), read[1]) == ([1, 2, 3, 4], True)
    copy = tmp_path / "copy"
    copy.write_text("".join(json.dumps(runs.train_line(n)) + "\n" for n in (7, 8, 9, 10, 11)))
    shutil.copyfile(copy, path)  # keeps the inode, and is longer
    assert (steps((read := tail.lines())[0]), read[1]) == ([7, 8, 9, 10, 11], True)


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert Tail(tmp_path).lines() == ([], False)
