"""What every test shares."""

import os

# As every launcher does, before anything imports torch: tests run side by side, and threads that
# spin for each other take the cores from what they wait for.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from helpers import rings
from helpers.ranks import Server
from hypothesis import settings

settings.register_profile("sweep", max_examples=1000)  # of `make test-slow`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before `-m` chooses among them."""
    rings.mark(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """With its fixtures, a test that is not marked `launches` starts no interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("launches") is None:
            rings.forbid_interpreters(patch)
        return (yield)


@pytest.fixture(scope="session")
def server():
    """Starts ranks without importing torch again."""
    made = Server()
    yield made
    made.close()
