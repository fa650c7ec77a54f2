import json

import pytest
from helpers import corpus

from llmtrain.data.manifest import glance
from llmtrain.errors import UserError


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"seed": 1', "\x00"])
def test_a_file_that_is_no_manifest_is_named_with_the_remedy(tmp_path, text):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(UserError, match="the manifest of a run") as raised:
        glance(path)
    assert raised.value.problems[0].key == str(path)
    assert "restore it" in str(raised.value.problems[0].remedy)


def test_every_key_of_a_manifest_is_needed_but_those_that_only_describe_it(tmp_path):
    corpus.write_tokenizer(tmp_path / "tokenizer")
    source = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.articles(30))
    path = tmp_path / "manifest.json"
    whole = json.loads(corpus.manifest_of(tmp_path / "tokenizer", source).to_bytes())
    for key in whole.keys() - {"version", "fingerprint"}:
        path.write_text(json.dumps({name: whole[name] for name in whole if name != key}))
        with pytest.raises(UserError):
            glance(path)
    path.write_text(json.dumps(whole))
    assert glance(path) == whole
