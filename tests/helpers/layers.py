"""Who may import whom: read from syntax trees, so nothing is imported to find out.

    5 cli, scripts · 4 tools, report · 3 training · 2 rooms · 1 config · 0 errors, types, system …

Imports go down. A room knows no other room, and nothing knows what knows it. Outside packages that
are slow to import stand at the top of a module only where `TOP_LEVEL` allows them.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "llmtrain"
ROOMS = ("data", "model", "distributed", "checkpoint", "metrics", "rundir")
BOTTOM = ("errors", "types", "hashing", "faults", "system")
LAYERS = {
    **dict.fromkeys(("text", "pairs", "batch_size"), -1),  # for errors and types too
    **dict.fromkeys(BOTTOM, 0),
    **dict.fromkeys(("config", "agreement", "torch_private"), 1),
    **dict.fromkeys(ROOMS, 2),
    "training": 3,
    **dict.fromkeys(("tools", "report"), 4),
    **dict.fromkeys(("cli", "scripts", "__main__", "__init__"), 5),
}
# Outside packages at the top of a module: the longest matching name counts.
TOP_LEVEL: dict[str, set[str]] = {
    "hashing": {"numpy"},
    "config": {"pydantic", "pydantic_core", "yaml"},
    "data": {"numpy", "pyarrow", "xxhash"},
    "data.chat": {"jinja2", "numpy", "xxhash"},
    "model": {"torch", "transformers"},
    "model.attention": {"torch", "transformers", "numpy"},
    "torch_private": {"torch"},
    "distributed": {"torch", "accelerate"},
    "distributed.engines": {"torch", "accelerate", "transformers", "psutil"},
    "distributed.plan": set(),
    "distributed.launch": set(),
    "checkpoint": {"safetensors", "xxhash"},
    "checkpoint.write": {"safetensors", "xxhash", "torch"},
    "checkpoint.background": {"safetensors", "xxhash", "torch"},
    "metrics": {"torch", "psutil"},
    "rundir": set(),
    "rundir.reference": {"numpy", "xxhash"},
    "training": {"torch", "accelerate", "numpy", "transformers", "psutil"},
    "training.stop": set(),
    "tools.launch.elastic": {"torch"},
    "tools.use": {
        *("torch", "numpy", "transformers", "huggingface_hub", "safetensors", "pydantic", "yaml"),
    },
    "tools.train_one": {"torch", "transformers", "safetensors"},
    "cli": {"typer"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module.

    at_top: it runs when the importing module is imported. One that only type checkers read does
    not, but has a direction and closes cycles like any other.
    """

    importer: str
    imported: str
    line: int
    at_top: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def violations(root: Path) -> list[str]:
    """Every import under root/llmtrain and root/scripts that breaks a rule, as a sentence."""
    modules = dict(_modules(root))
    imports = [one for name, path in modules.items() for one in _imports(name, path, modules)]
    inner = [one for one in imports if _is_inner(one.imported)]
    outer = [one for one in imports if not _is_inner(one.imported) and one.at_top]
    wrong = [reason for one in inner if (reason := _wrong_direction(one))]
    wrong += [reason for one in outer if (reason := _too_heavy(one))]
    return wrong + _cycles(inner)


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_inner_package = parts[-1] == "__init__" and len(parts) > 2
        yield ".".join(parts[:-1] if is_inner_package else parts), path
    for path in sorted((root / "scripts").glob("*.py")):
        yield f"scripts.{path.stem}", path


def _imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node, at_top in _walk(tree, at_top=True):
        for imported in _names(node, name, path, modules):
            yield Import(name, imported, node.lineno, at_top)


def _walk(node: ast.AST, *, at_top: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_top
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        checked = isinstance(child, ast.If) and _is_type_checking(child.test)
        yield from _walk(child, at_top=at_top and not (function or checked))


def _names(node: ast.stmt, name: str, path: Path, modules: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    # `from llmtrain.data import stream` imports a module, `from llmtrain.errors import X` a name.
    return [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_inner(module: str) -> bool:
    return module.split(".")[0] in (PACKAGE, "scripts")


def _part(module: str) -> str:
    """`llmtrain.data.stream` → `data`; the package itself is `__init__`."""
    names = module.split(".")
    if names[0] == "scripts":
        return "scripts"
    return names[1] if len(names) > 1 else "__init__"


def _wrong_direction(one: Import) -> str | None:
    importer, imported = _part(one.importer), _part(one.imported)
    for part, module in ((importer, one.importer), (imported, one.imported)):
        if part not in LAYERS:
            return f"{module} stands in no layer"
    if importer == imported:
        return None
    above, below = LAYERS[importer], LAYERS[imported]
    if below > above:
        return f"{one}: upwards, from layer {above} to layer {below}"
    if below == above < 5:
        return f"{one}: between {'rooms' if above == 2 else 'modules'} of layer {above}"
    return None


def _too_heavy(one: Import) -> str | None:
    package = one.imported.split(".")[0]
    if package in sys.stdlib_module_names or package == "__future__":
        return None
    module = one.importer.removeprefix(f"{PACKAGE}.")
    # Data workers import scripts/train.py again; the other scripts are tools on their own.
    if module.startswith("scripts.") and module != "scripts.train":
        return None
    rules = [rule for rule in TOP_LEVEL if module == rule or module.startswith(f"{rule}.")]
    allowed = TOP_LEVEL[max(rules, key=len)] if rules else set()
    return None if package in allowed else f"{one} at its top; import it inside a function"


def _cycles(imports: list[Import]) -> list[str]:
    """Each cycle of modules once, found depth first."""
    edges: dict[str, list[str]] = {}
    for one in imports:
        edges.setdefault(one.importer, []).append(one.imported)
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            cycle = path[path.index(module) :]
            found.setdefault(frozenset(cycle), "cycle: " + " → ".join([*cycle, module]))
        elif module not in done:
            for imported in edges.get(module, []):
                if imported != module:
                    visit(imported, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return list(found.values())
