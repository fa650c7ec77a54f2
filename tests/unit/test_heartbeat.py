from llmtrain import heartbeat


def test_each_beat_counts_and_the_last_phase_stays():
    before, _ = heartbeat.read()
    heartbeat.beat("reading")
    heartbeat.beat("writing")
    assert heartbeat.read() == (before + 2, "writing")
