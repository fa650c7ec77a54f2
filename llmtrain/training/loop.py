"""The whole training loop, to be read as a page. Details stand behind the names.

Order at a boundary: receive numbers, log what has arrived, evaluate, save, stop.
"""

from __future__ import annotations

from llmtrain.config.schema import Config
from llmtrain.training.ending import Result, finish
from llmtrain.training.evaluate import evaluate
from llmtrain.training.sample import sample
from llmtrain.training.saving import save
from llmtrain.training.schedule import learning_rate_factor
from llmtrain.training.start.open import start_run
from llmtrain.training.step import begin, update


def train(config: Config) -> Result:
    """Train to the last step, from the newest valid checkpoint if the run directory has one.

    Runs on every rank. Raises UserError for what a person can put right (before the first step, at
    a step without trained tokens, in a bad unit or row), RunError for what the machine did. Returns
    once the last checkpoint is on disk.
    """
    with start_run(config) as run:  # everything built, state resumed
        if run.due.evaluation(run.step):  # the base line, or one that a stop left out
            run.log.evaluation(run.step, evaluate(run))
            run.log.samples(run.step, sample(run))
        for step in range(run.step + 1, run.steps + 1):
            if run.due.stop(run.step):  # signal, STOP file, lost launcher: the same on all ranks
                break
            begin(run, step)  # the clock; the state to return to if data fails
            batch = run.feed.next_batch()  # this rank's blocks of one step
            update(run, batch, learning_rate_factor(config.optimizer, run.steps, step))
            run.feed.advance(step, batch)  # only now do these blocks count as consumed

            for numbers in run.meter.receive(step, run.due):
                run.log.training(numbers)  # of step - 1, which may make a stop due;
                run.guards.check(numbers)  # then of this step, if anything is due
            if run.due.evaluation(step):
                run.log.evaluation(step, evaluate(run))  # still due if a stop cut it off;
                run.log.samples(step, sample(run))  # then there are no samples either
            if run.due.checkpoint(step):  # at a stop and at the last step too
                save(run, step)
        return finish(run)  # end line and status; nothing is left to do
