"""Where the model is that an adapter was trained on."""

import json
import shutil

import pytest
from helpers import used
from helpers.checkpoints import flip

from llmtrain.errors import UserError
from llmtrain.tools.use.load import base_directory


def test_a_base_that_changed_or_is_gone_is_refused(tmp_path):
    pytest.importorskip("peft")
    files = used.tokenizer(tmp_path / "tokenizer")
    base = used.directory(tmp_path / "base", used.model(), files)
    adapter = used.adapter(tmp_path / "adapter", base, files)
    assert base_directory(adapter) == base
    flip(base / "model.safetensors")
    with pytest.raises(UserError, match="that directory has other weights now") as caught:
        base_directory(adapter)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("base of adapter", str(base))
    assert problem.remedy == "put it back"
    known = json.loads((adapter / "adapter.json").read_text())["base"]
    (adapter / "adapter.json").write_text(json.dumps({"base": known | {"digest": None}}))
    assert base_directory(adapter) == base  # an adapter of peft alone, whose base has no digest
    shutil.rmtree(base)
    with pytest.raises(UserError, match="that directory is gone"):
        base_directory(adapter)
