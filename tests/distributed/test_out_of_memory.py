"""A device whose memory runs out in a step, although the plan said that everything fits."""

from helpers.tiny import lines, status, tiny_config, write_config

from llmtrain.text import size


def test_a_full_device_is_compared_with_the_plan_and_one_change_is_named(server, tmp_path):
    path = write_config(tmp_path, tiny_config(tmp_path / "run", training__micro_batch_size=4))
    arguments = ["call", "helpers.odd_ranks", "on_a_full_device", str(path)]
    assert server.run(arguments, 1, tmp_path) == [2]
    said = (tmp_path / "output.txt").read_text()
    planned = lines(tmp_path / "run", "start")[0]["plan"]["total_bytes"]
    assert "Traceback" not in said
    message = said[said.index("error: 1 problem") :]
    assert "at the peak, and 2 GiB more asked for" in message
    assert f"at most the {size(planned)} planned for ddp" in message
    assert "which 1.50 GiB is free.)" in message
    assert "try:      training.micro_batch_size=3; `llmtrain plan`" in message
    end = status(tmp_path / "run")
    assert (end["state"], end["exit_code"]) == ("failed", 2)
    assert "training.micro_batch_size=3" in end["reason"]
