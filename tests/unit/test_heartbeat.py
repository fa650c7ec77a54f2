from llmtrain import heartbeat


def test_each_beat_counts_and_the_last_phase_stays():
    before, _ = heartbeat.read()
    heartbeat.beat("reading")
    heartbeat.beat("writing")
    assert heartbeat.read() == (before + 2, "writing")


def test_more_work_of_a_phase_keeps_its_count():
    before, _ = heartbeat.read()
    heartbeat.beat("reading files", 3, 2000)
    heartbeat.again()
    assert heartbeat.read() == (before + 2, "reading files")
    assert heartbeat.in_words() == "reading files (3 of 2,000)"
