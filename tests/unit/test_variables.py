"""What torch is told by variables before it is imported."""

import pytest

from llmtrain import system

EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": EXPANDABLE}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_the_allocator_grows_its_segments_unless_it_was_told_otherwise(there, expected):
    env = dict(there)
    system.set_variables_of_torch(env)
    assert env == {**expected, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_that_wait_do_as_the_user_says(name):
    env = {name: "as the user says", "PYTORCH_ALLOC_CONF": ""}
    system.set_variables_of_torch(env)
    assert env == {name: "as the user says", "PYTORCH_ALLOC_CONF": ""}
