"""Going on from an older checkpoint because somebody says so."""

OLDER = "step-00000016"


def test_a_run_told_to_go_back_sets_the_newer_ones_aside_and_trains_the_same_bits(
    finished, straight
):
    run = finished(2)
    before = run.names()
    assert run.launch("", f"checkpoint.resume={OLDER}", world_size=1) == [2]
    assert "newer are step-00000024, step-00000020" in run.output()
    assert run.names() == before
    asked = (f"checkpoint.resume={OLDER}", "checkpoint.supersede=true")
    assert run.launch("", *asked) == [0, 0], run.output()
    assert run.resumed()[-1] == OLDER
    superseded = [event["now"] for event in run.events("checkpoint_superseded")]
    assert superseded == ["step-00000024.superseded", "step-00000020.superseded"]
    assert set(superseded) < set(run.names())
    assert run.outcome() == straight(2)
