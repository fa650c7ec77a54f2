"""The shape of the package, by syntax trees: what a reader has to open and to keep in mind."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "llmtrain"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Private names of torch, accelerate, transformers, deepspeed and CPython are used here alone.
WITH_PRIVATE_NAMES = {
    "torch_private.py": "torch",
    "distributed/engines/zero.py": "deepspeed",
    "distributed/engines/accelerator.py": "accelerate",
    "model/attention.py": "transformers",
    "cli/rank.py": "CPython",
}
# Not private: documented with an underscore, of our own files' formats, or of another library.
PUBLIC = {"_exit", "_asdict", "_data_files", "_indices_data_files", "_warned_failures"}
ENDINGS = {"_offload", "_token_id", "_time_total", "_USE_", "_function"}  # of longer names


@cache
def trees():
    found = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    return {path.relative_to(PACKAGE).as_posix(): tree for path, tree in found.items()}


def nodes(*kinds):
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield name, node


def own_names():
    for _, node in nodes(ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def private_names():
    """File → the private names of other libraries in it: attributes, imports and strings."""
    own = set(own_names()) | PUBLIC | ENDINGS
    found = defaultdict(list)
    for file, node in nodes(ast.Attribute, ast.ImportFrom, ast.Constant):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                names = [name]
            case ast.ImportFrom(module=module, names=names) if module:
                outside = not module.startswith("llmtrain")
                names = [*module.split("."), *(one.name for one in names)] if outside else []
            case _:
                continue
        found[file] += [n for n in names if PRIVATE.fullmatch(n) and n not in own]
    return {file: names for file, names in found.items() if names}


def test_private_names_of_other_libraries_stand_in_a_module_for_each():
    assert private_names().keys() == WITH_PRIVATE_NAMES.keys()
    assert sum(map(len, private_names().values())) <= 30


def test_few_signatures_say_that_anything_goes():
    def says_any(annotation):
        return annotation is not None and any(
            isinstance(part, ast.Name) and part.id == "Any" for part in ast.walk(annotation)
        )

    def annotations(function):
        given = function.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return [function.returns, *(one.annotation for one in every if one is not None)]

    loose = [
        f"{file}: {function.name}"
        for file, function in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if any(map(says_any, annotations(function)))
    ]
    assert len(loose) <= 170


def test_a_class_name_has_one_meaning():
    counts = Counter(node.name for _, node in nodes(ast.ClassDef))
    # The run that a program opens, and the state of one that trains; a block and its candidates.
    assert {name for name, count in counts.items() if count > 1} <= {"Run"}


def test_a_file_is_one_subject_and_a_folder_can_be_read_at_a_glance():
    lines = {file: (PACKAGE / file).read_text("utf-8").count("\n") for file in trees()}
    assert [file for file, count in lines.items() if count > 600] == []
    assert len(lines) <= 200
    folders = Counter(str(Path(file).parent) for file in lines if not file.endswith("__init__.py"))
    assert [folder for folder, count in folders.items() if count > 14] == []


@pytest.mark.parametrize(("share", "most"), [(0.9, 28), (1.0, 50)])
def test_a_function_fits_a_readers_thought(share, most):
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for _, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    )
    assert lengths[round(share * (len(lengths) - 1))] <= most
