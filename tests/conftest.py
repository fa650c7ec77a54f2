"""What every test shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ranks import Server

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts ranks without importing torch again."""
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real articles and tokenizers, where they lie beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"the development data is not at {SHARED}")
    return SHARED
