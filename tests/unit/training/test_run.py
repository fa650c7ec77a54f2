"""`Run` holds values; what is done with it is a function of it, in a module above."""

import ast
from dataclasses import fields
from pathlib import Path

from llmtrain.training import run


def test_a_run_has_fifteen_fields_and_no_verb():
    assert len(fields(run.Run)) <= 15
    (tree,) = (
        node
        for node in ast.parse(Path(run.__file__).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Run"
    )
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert all(ast.unparse(node.decorator_list[0]) == "property" for node in methods)


def test_a_run_imports_nothing_that_works_on_one():
    parts = ("due", "guards", "journal", "run")
    below = {f"llmtrain.training.{name}" for name in (*parts, "stop")}
    for name in parts:
        path = Path(run.__file__).with_name(f"{name}.py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("llmtrain.train"):
                assert node.module in below
