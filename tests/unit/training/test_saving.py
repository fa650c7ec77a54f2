"""Decisions of a save that need no run; whole runs are in tests/faults and tests/distributed."""

from llmtrain.training.saving import short_of_memory


def rank(host: str, needed: int, free: int) -> dict:
    return {"host": host, "needed": needed, "free": free}


def test_bad_input_25_copies_of_all_ranks_of_a_host_must_fit_into_what_is_free_there() -> None:
    assert short_of_memory([rank("a", 100, 1000), rank("a", 100, 990)]) == []
    assert short_of_memory([rank("a", 600, 1000), rank("a", 600, 990)]) == ["a"]


def test_each_host_counts_for_itself() -> None:
    heard = [rank("a", 600, 1000), rank("b", 600, 500), rank("c", 0, 0)]
    assert short_of_memory(heard) == ["b"]


def test_the_training_beside_the_copy_needs_some_memory_too() -> None:
    assert short_of_memory([rank("a", 1000, 1000)]) == ["a"]


def test_a_rank_that_writes_nothing_needs_nothing() -> None:
    assert short_of_memory([rank("a", 600, 700), rank("a", 0, 700)]) == []
