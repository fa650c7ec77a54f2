"""The documents that `--data` names, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from llmtrain.config.binding import data_settings
from llmtrain.config.load import load_config
from llmtrain.config.schema import Config
from llmtrain.data import heldout
from llmtrain.data.documents.reader import reading_of
from llmtrain.data.manifest import Source
from llmtrain.data.survey import evaluation_sources, survey
from llmtrain.errors import Problem, UserError

KEY = "--data"
_CONFIG = (".yaml", ".yml")


def texts(given: str) -> Iterator[str]:
    """Yield the documents of files or a data set, or those that a config holds out.

    given: what `data.sources.path` may be; or a config, whose evaluation.sources or held-out
        documents are meant, at most its evaluation.max_documents

    Raises UserError for what cannot be read, for conversations, and for a token cache, which has
    no text.
    """
    if given.endswith(_CONFIG):
        config = load_config(given)
        limit: int | None = config.evaluation.max_documents
    else:
        one = {"path": given}
        described = {"data": {"sources": [one]}, "evaluation": {"sources": [one]}}
        config, limit = Config.model_validate({**described, "training": {"steps": 1}}), None
    settings = data_settings(config)
    reading = reading_of(settings, None)
    try:
        sources: Sequence[Source] = evaluation_sources(settings, reading)
        sources = sources or survey(settings, 1).sources
    except UserError as error:
        key = "evaluation.sources.0.path"
        problems = (replace(p, key=KEY if p.key == key else p.key) for p in error.problems)
        raise UserError(*problems, where=error.where) from error
    for source in sources:
        if source.cached:
            raise UserError(Problem(KEY, source.path, "documents of text, not a token cache"))
        if source.form is not None:
            remedy = (
                "--data RUN scores the held-out conversations of a run that has some, also with "
                "other models of its tokenizer"
            )
            expected = "documents of text, not conversations"
            raise UserError(Problem(KEY, source.path, expected, remedy))
    return islice(heldout.texts(sources, settings.seed, reading), limit)
