from llmtrain import pulse


def test_each_beat_counts_and_the_last_phase_stays():
    before, _ = pulse.read()
    pulse.beat("reading")
    pulse.beat("writing")
    assert pulse.read() == (before + 2, "writing")
