from llmtrain import system


def test_each_beat_counts_and_the_last_phase_stays():
    before, _ = system.last_beat()
    system.beat("reading")
    system.beat("writing")
    assert system.last_beat() == (before + 2, "writing")


def test_more_work_of_a_phase_keeps_its_count():
    before, _ = system.last_beat()
    system.beat("reading files", 3, 2000)
    system.beat_again()
    assert system.last_beat() == (before + 2, "reading files")
    assert system.beat_in_words() == "reading files (3 of 2,000)"
