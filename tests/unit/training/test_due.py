from dataclasses import replace

from llmtrain.agreement import Alone
from llmtrain.training.due import Due, agreed_stop
from llmtrain.types import Flags, Numbers


def due(first=0, evaluated=None, *, heldout=True, ended=False, **more):
    return Due(
        steps=50,
        evaluate_every=20,
        save_every=15,
        log_every=10,
        first=first,
        last_evaluation=evaluated,
        heldout=heldout,
        data_ended=ended,
        **more,
    )


def numbers(step, *stops):
    return Numbers(step, 1.0, 1.0, 1.0, 1, 1, 1.0, 0.0, 0, False, {}, False, stops=stops)


def test_the_base_line_the_period_and_the_end_are_evaluated():
    one = due()
    assert [step for step in range(51) if one.evaluation(step)] == [0, 20, 40, 50]
    one.record_evaluation(20, lower=True)
    assert not one.evaluation(20)
    assert not any(due(heldout=False).evaluation(step) for step in range(51))


def test_what_a_stop_cut_off_is_evaluated_by_the_next_start():
    assert due(first=20, evaluated=0).evaluation(20)
    assert not due(first=20, evaluated=20).evaluation(20)


def test_a_checkpoint_is_due_at_the_period_the_end_and_a_stop_but_never_twice():
    one = due()
    assert [step for step in range(51) if one.checkpoint(step)] == [15, 30, 45, 50]
    one.begin_save(30)
    one.end_save(30, saved=True)
    assert not one.checkpoint(30)
    assert not due(first=30).checkpoint(30)
    one.learn(numbers(36, "signal"))
    assert one.checkpoint(37)
    assert one.stop(37)


def test_what_is_in_flight_is_due_at_the_step_at_which_all_ranks_have_written():
    one = due()
    one.begin_save(15)
    one.learn(numbers(16))
    assert not one.checkpoint(17)
    assert not one.anything(17)
    one.learn(numbers(17)._replace(written=True))
    assert one.checkpoint(18)
    assert one.anything(18), "the vector of this step still says that it was written"
    assert not one.begins(18)
    one.end_save(15, saved=True)
    assert not one.checkpoint(18)


def test_a_save_that_begins_is_not_written_because_the_one_before_was():
    one = due()
    one.begin_save(15)
    one.learn(numbers(16)._replace(written=True))
    one.end_save(15, saved=True)
    one.learn(numbers(29)._replace(written=True))  # an answer of the save before, which came late
    one.begin_save(30)
    assert not one.checkpoint(31)
    one.learn(numbers(31)._replace(written=True))
    one.learn(numbers(32))
    assert not one.checkpoint(33), "the newest answer counts: some rank is still writing"


def test_nothing_is_committed_that_is_not_in_flight():
    one = due()
    one.learn(numbers(17)._replace(written=True))
    assert not one.checkpoint(18)


def test_a_save_that_failed_leaves_its_step_unsaved():
    one = due(first=12)
    one.begin_save(15)
    assert not one.unsaved(15)
    one.end_save(15, saved=False)
    assert one.unsaved(15)
    assert not one.unsaved(12), "this start resumed from it"
    assert not one.checkpoint(16)
    assert one.checkpoint(30)


def test_a_wish_is_served_once_at_the_next_boundary():
    one = due()
    one.learn(numbers(6)._replace(save=True))
    one.learn(numbers(7))
    assert one.checkpoint(7)
    assert one.reason(7) == "asked"
    one.begin_save(7)
    one.end_save(7, saved=True)
    assert not one.checkpoint(8)
    assert not one.stop(8)


def test_the_reason_of_a_save_is_what_ends_the_run_before_its_period():
    assert due().reason(15) == "period"
    assert due().reason(50) == "end"
    one = due()
    one.learn(numbers(14, "stop_after"))
    assert one.reason(15) == "stop_after"


def test_a_stop_suppresses_evaluations_and_asks_for_the_last_line():
    one = due()
    assert not one.line(37)
    one.learn(numbers(36, "stop_file"))
    assert one.stop_reason == "stop_file"
    assert not one.evaluation(40)
    assert one.line(37)
    assert one.anything(37)


def test_a_lost_launcher_outranks_the_signal_that_comes_with_it():
    one = due()
    one.learn(numbers(3, "launcher_lost", "signal"))
    assert one.stop_reason == "launcher_lost"


def test_lines_come_at_the_period_the_first_step_of_a_start_and_the_last():
    one = due(first=13)
    assert [step for step in range(14, 51) if one.line(step)] == [14, 20, 30, 40, 50]


def test_a_run_is_finished_when_nothing_is_missing():
    one = due()
    assert not one.finished(50)
    one.record_evaluation(50, lower=False)
    assert one.finished(50)
    assert not one.finished(49)


def test_outside_a_step_ranks_agree_on_the_reason_that_outranks_others():
    assert agreed_stop(Alone(), Flags()) == ()
    assert agreed_stop(Alone(), Flags(signal=True, stop_file=True)) == ("signal",)
    assert agreed_stop(Alone(), Flags(signal=True, launcher_lost=True)) == ("launcher_lost",)


def test_the_end_of_the_data_ends_a_run_like_its_last_step():
    one = due()
    assert not one.stop(37)
    one.learn(numbers(36)._replace(ended=True))
    assert one.stop(37)
    assert one.evaluation(37)
    assert one.checkpoint(37)
    assert one.line(37)
    assert not one.finished(37)
    one.record_evaluation(37, lower=False)
    assert one.finished(37)
    assert one.stop_reason is None


def test_a_run_whose_data_ended_takes_no_step_after_a_resume():
    again = due(first=37, evaluated=37, ended=True)
    assert again.stop(37)
    assert again.finished(37)
    assert not again.checkpoint(37)


def test_the_best_evaluation_so_far_is_saved_at_its_step():
    one = due(keep_best=True)
    one.record_evaluation(0, lower=True)
    assert not one.begins(0), "nothing was trained yet"
    one.record_evaluation(20, lower=True)
    assert one.begins(20)
    assert one.checkpoint(20)
    assert one.reason(20) == "best"
    one.begin_save(20)
    one.end_save(20, saved=True)
    assert not one.begins(20)
    assert not one.begins(21)
    one.record_evaluation(40, lower=False)
    assert not one.begins(40)


def test_what_somebody_asked_for_is_saved_as_asked():
    one = due(keep_best=True)
    one.learn(numbers(19)._replace(save=True))
    one.record_evaluation(20, lower=True)
    assert one.reason(20) == "asked"


def test_what_is_saved_anyway_keeps_its_reason():
    one = due(keep_best=True)
    one.record_evaluation(30, lower=True)
    assert one.reason(30) == "period"
    one.record_evaluation(50, lower=True)
    assert one.reason(50) == "end"


def test_without_best_checkpoints_an_evaluation_saves_nothing():
    one = due()
    one.record_evaluation(20, lower=True)
    assert not one.begins(20)


def test_patience_ends_a_run_like_its_last_step():
    one = due(patience=2)
    one.record_evaluation(0, lower=True)
    one.record_evaluation(20, lower=False)
    assert not one.stop(20)
    one.record_evaluation(40, lower=False)
    assert one.stop(40)
    assert one.checkpoint(40)
    assert one.reason(40) == "end"
    assert not one.evaluation(40)
    assert one.finished(40)
    assert one.ended_by(40) == "patience"
    assert one.stop_reason is None


def test_a_lower_loss_gives_patience_again():
    one = due(patience=2)
    for step, lower in ((0, True), (10, False), (20, True), (30, False)):
        one.record_evaluation(step, lower=lower)
    assert one.without_gain == 1
    assert not one.stop(30)


def test_a_run_that_ran_out_of_patience_ends_at_once_unless_it_gets_more():
    again = due(first=40, evaluated=40, patience=2, without_gain=2)
    assert again.stop(40)
    assert again.finished(40)
    assert not again.checkpoint(40)
    assert not due(first=40, evaluated=40, patience=3, without_gain=2).stop(40)
    assert not due(first=40, evaluated=40, without_gain=2).stop(40)


def test_less_patience_than_was_spent_evaluates_once_more_before_it_ends():
    again = due(first=33, evaluated=20, patience=1, without_gain=1)
    assert again.evaluation(33)
    again.record_evaluation(33, lower=True)
    assert not again.stop(33)


def test_at_the_last_step_patience_is_not_what_ended_the_run():
    one = due(patience=1)
    one.record_evaluation(50, lower=False)
    assert one.finished(50)
    assert one.ended_by(50) is None
    assert due(ended=True, patience=1, without_gain=1).ended_by(37) == "data_ended"


def test_a_step_that_may_be_the_last_for_want_of_patience_has_a_line():
    every = {"evaluate_every": 12}
    one = replace(due(patience=2), **every)
    assert [step for step in range(1, 50) if one.line(step)] == [1, 10, 12, 20, 24, 30, 36, 40, 48]
    assert not replace(due(), **every).line(12)
