from helpers import corpus

from llmtrain.data.documents.reader import Reader, Reading
from llmtrain.data.lanes import START, Lane
from llmtrain.data.tokens.encode import Encoder
from llmtrain.data.tokens.tokenizer import open_tokenizer


def test_what_was_met_is_counted_with_one_document_alone(tmp_path):
    """Several texts are tokenized in one call; what is met behind one of them is not its own."""
    rows = corpus.articles(40)
    for n in (10, 20, 21):
        rows[n]["text"] = " "
    path = corpus.write_parquet(tmp_path / "a.parquet", rows, group=40)
    tokenizer_dir = corpus.write_tokenizer(tmp_path / "tokenizer")
    source = {"path": str(path), "max_epochs": 1}
    manifest = corpus.manifest_of(tokenizer_dir, source, lanes=1, seq_len=64)
    parts = (manifest, Encoder(open_tokenizer(tokenizer_dir)), Reader(Reading(60)))
    documents = list(Lane(*parts, 0, 0, [START]).walk(0, START, again=False))
    assert len(documents) == 37 + 1
    assert sum(document.counts["dropped"] for document in documents) == 3
