"""`training.compile`: the blocks of a model, or its whole decoder, compiled in place by torch.

    off      nothing
    blocks   each repeated block: equal blocks share one graph, and one more where no gradients are
             needed
    model    the whole decoder; head and loss are not compiled

Modules are compiled in place, so the names of parameters do not change. A graph holds for one set
of shapes. If others come, torch compiles again, and after a number of graphs it runs a block
uncompiled. Neither ends a run. What has a shape of its own each time runs `uncompiled`: samples,
which grow by a token, and the check of isolation.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from llmtrain.config.checks import whole_with_documents
from llmtrain.errors import Problem
from llmtrain.model.shape import blocks
from llmtrain.types import Compiled

KEY = "training.compile"
_SPARE_GRAPHS = 8
# Not imported here: it takes two seconds, and whoever compiles nothing need not wait for it.
_COMPILER = "torch._dynamo.utils"


def compile_blocks(model: PreTrainedModel, mode: Compiled) -> int:
    """Let torch compile a bare model in place, at its first forward. Return how many modules.

    Call it before the model is sharded or wrapped.
    """
    if mode == "off":
        return 0
    chosen = blocks(model) if mode == "blocks" else [model.base_model]
    # The most graphs of one piece of code. Blocks whose code depends on their number need one each
    # for training, and one without gradients.
    limit = 2 * len(chosen) + _SPARE_GRAPHS
    for module in chosen:
        module.compile(dynamic=False, recompile_limit=limit)
    return len(chosen)


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which nothing is compiled, and what is compiled runs as its own code."""
    if _COMPILER not in sys.modules:
        return nullcontext()
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return context


def graphs() -> int:
    """Return how many graphs this process has compiled."""
    compiler = sys.modules.get(_COMPILER)
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler else 0


def problems(mode: Compiled, *, cpu: bool, document_mask: bool = False) -> Iterator[Problem]:
    """Yield what is missing for a mode on this machine, or forbids it."""
    if mode == "model" and document_mask:
        yield whole_with_documents()
    if mode != "off" and (missing := missing_compiler(cpu=cpu)):
        yield Problem(KEY, mode, missing, f"install it, or {KEY}=off")


def missing_compiler(*, cpu: bool) -> str:
    """Return what torch lacks to compile for this type of device; "" if nothing.

    It looks where torch's inductor (CPU) and Triton (CUDA) look.
    """
    if cpu:
        usual = "clang++" if sys.platform == "darwin" else "g++"
        name = os.environ.get("CXX", usual)
        compiler = shutil.which(name)
        return "" if compiler else f"a C++ compiler: {name} is not on PATH (CXX names another)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which compiles for CUDA"
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if any(shutil.which(name) for name in names):
        return ""
    return f"a C compiler for Triton: {' or '.join(names)} is not on PATH (CC names another)"
