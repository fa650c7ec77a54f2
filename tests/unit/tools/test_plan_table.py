from html.parser import HTMLParser

from llmtrain.tools.plan import table

GIB = 2**30


def row(name, **changes):
    parts = {"parameters": 3 * GIB, "gradients": 2 * GIB, "optimizer": 6 * GIB, "reserve": 0}
    return {
        "name": name, "chosen": False, "activation_checkpointing": "none", "micro_batch_size": 8,
        "accumulation": 4, "parts": parts, "total_bytes": 11 * GIB, "host_bytes": GIB,
        "fits": True, "missing_bytes": 0, "remedy": "", "tokens_per_second": 1234.6,
    } | changes  # fmt: skip


class Cells(HTMLParser):
    """The text of each cell, row by row, and every tag."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def test_each_strategy_is_a_row():
    rows = [
        row("ddp", fits=False, remedy="adapter.kind=lora"),
        row("fsdp2", chosen=True),
        row("zero2", total_bytes=None, fits=None, tokens_per_second=None),
    ]
    head, ddp, fsdp2, zero2 = Cells(table({"reason": "it fits", "strategies": rows})).rows
    assert len(head) == len(ddp) == len(fsdp2) == len(zero2)
    assert ddp[0] == "ddp"
    assert ddp[-1] == "no; try adapter.kind=lora"
    assert fsdp2[0] == "fsdp2, chosen"
    assert fsdp2[1].startswith("11 GiB (optimizer 6 GiB, parameters 3 GiB, gradients 2 GiB")
    assert fsdp2[2:] == ["none", "8", "4", "1,235", "yes"]
    assert zero2[1].startswith("? (")
    assert zero2[-2:] == ["?", "?"]


def test_text_stays_text():
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>&"
    found = Cells(table({"reason": hostile, "strategies": [row(hostile, remedy=hostile)]}))
    assert not {"script", "img"} & set(found.tags)
    assert found.rows[1][0] == hostile
