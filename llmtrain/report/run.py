"""A run as an object, to read: `open_run`. It needs no torch until a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import Problem, UserError
from llmtrain.report import verdict
from llmtrain.report.collect import Tables, collect, final_history
from llmtrain.rundir import contents, record, status
from llmtrain.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SECONDS = 0.5


def open_run(directory: str | Path) -> Run:
    """Open the directory of a run for reading. Raises UserError if it has no run."""
    return Run(Path(directory))


class Run:
    """A run that exists, read-only. Each access reads its files again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        collect(directory)  # raises UserError if this is no run

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.resolve().name

    @property
    def status(self) -> JsonMapping:
        """The content of `status.json`."""
        return status.read_status(self.directory)

    @property
    def config(self) -> Mapping[str, object]:
        """The values of its config by `section.key`."""
        return self._tables().settings

    @property
    def checkpoints(self) -> Sequence[str]:
        """The names of its checkpoints that are still there, oldest first."""
        return [str(one["name"]) for one in self._tables().kept_checkpoints]

    @property
    def best(self) -> Path | None:
        """The checkpoint of the lowest held-out loss, else the newest that was not evaluated.

        None without any, as when no held-out loss is finite.
        """
        if (checkpoint := verdict.best_checkpoint(self._tables())) is None:
            return None
        return self.directory / contents.CHECKPOINTS / str(checkpoint["name"])

    def metrics(self, kind: str) -> list[JsonObject]:
        """Return the lines of a kind (`train`, `eval`, …) of the final history, by step."""
        lines = record.record(self.directory)
        return [dict(line) for line in final_history(lines) if line["kind"] == kind]

    def follow(self) -> Iterator[JsonObject]:
        """Yield the lines of the record, old ones and new ones, until the run ends.

        It ends with an `end` line; of a run that was killed, no line comes any more.
        """
        tail, over = record.Tail(self.directory), False
        while not over:
            lines, _ = tail.lines()
            for line in lines:
                over = line["kind"] == "end"
                yield line
            if not over and not tail.more:
                time.sleep(_SECONDS)

    def load(self) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
        """Return the model of the best checkpoint and its tokenizer, as transformers has them.

        It writes, or scores answers, if that is what the run trained.

        Raises UserError if there is no checkpoint.
        """
        from transformers import AutoConfig, AutoTokenizer

        from llmtrain.model.scorer import auto_class
        from llmtrain.model.untrusted import ADAPTER_CONFIG

        if (place := self.best) is None:
            expected = "a run with a checkpoint whose held-out loss, if it has one, is finite"
            raise UserError(Problem("RUN", self.directory, expected))
        files = self.directory / contents.TOKENIZER
        safe = {"trust_remote_code": False, "use_safetensors": True}
        tokenizer = AutoTokenizer.from_pretrained(files, trust_remote_code=False)
        if (place / ADAPTER_CONFIG).is_file():
            from peft import (
                AutoPeftModelForCausalLM,
                AutoPeftModelForSequenceClassification,
                PeftConfig,
            )

            scores = PeftConfig.from_pretrained(place).task_type == "SEQ_CLS"
            made = AutoPeftModelForSequenceClassification if scores else AutoPeftModelForCausalLM
            more = {"num_labels": 1} if scores else {}
            return made.from_pretrained(place, **safe, **more), tokenizer
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        return auto_class(config).from_pretrained(place, **safe), tokenizer

    def __repr__(self) -> str:
        return f"<Run {self.name}: {verdict.sentence(self._tables())}>"

    def _repr_html_(self) -> str:
        from llmtrain.report.page import inline

        return inline(self._tables())

    def _tables(self) -> Tables:
        return collect(self.directory)
