"""The documents that `--data` names."""

import pytest
from helpers import chats, corpus
from helpers.config import SMALLEST, written

from llmtrain.errors import UserError
from llmtrain.tools.use.evaluate import documents_of


def test_conversations_are_refused_by_the_name_of_the_option(tmp_path):
    path = corpus.write_jsonl(tmp_path / "chat.jsonl", chats.rows_of(20))
    config = written(tmp_path, SMALLEST.replace("path: sample", f"path: {path}"))
    for given in (path, config):
        with pytest.raises(UserError, match="documents of text, not conversations") as caught:
            documents_of(str(given))
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("--data", str(path))
        assert problem.remedy.startswith("--data RUN scores the held-out conversations of a run")
