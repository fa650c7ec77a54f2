"""The whole training loop on one page; details are in the functions that it calls.

Order at a boundary: receive numbers, log what has arrived, evaluate, save, stop.
"""

from llmtrain.config.schema import Config
from llmtrain.rundir.status import Result
from llmtrain.training.ending import finish
from llmtrain.training.evaluate import evaluate, sample
from llmtrain.training.optimizer import learning_rate_factor
from llmtrain.training.saving import save
from llmtrain.training.start.open import start_run
from llmtrain.training.step import begin, update


def train(config: Config) -> Result:
    """Train to the last step, from the newest valid checkpoint if the run directory has one.

    Runs on every rank. Returns once the last checkpoint is on disk. Raises UserError for what a
    person can correct (before the first step, at a step without trained tokens, in a bad unit or
    row), RunError for a failure of the machine.
    """
    with start_run(config) as run:  # everything built, state resumed
        if run.due.evaluation(run.step):  # the baseline, or one that a stop interrupted
            run.log.evaluation(run.step, evaluate(run))
            run.log.samples(run.step, sample(run))
        for step in range(run.step + 1, run.steps + 1):
            if run.due.stop(run.step):  # signal, STOP file, lost launcher: the same on all ranks
                break
            begin(run, step)  # starts the clock, keeps the state to return to if data fails
            batch = run.feed.next_batch()  # this rank's blocks of one step
            update(run, batch, learning_rate_factor(config.optimizer, run.steps, step))
            run.feed.advance(step, batch)  # only now do these blocks count as consumed

            for numbers in run.meter.receive(step, run.due.anything):
                run.due.learn(numbers)  # first of step - 1, which may make a stop due,
                run.log.training(numbers)  # then of this step too, if anything is due
                run.guards.check(numbers)
            if run.due.evaluation(step):
                run.log.evaluation(step, evaluate(run))  # if a stop interrupts it, it stays due
                run.log.samples(step, sample(run))  # and there are no samples either
            if run.due.checkpoint(step):  # also at a stop and at the last step
                save(run, step)
        return finish(run)  # writes the `end` line and the status
