"""A stage of a causal LM: some of its blocks, cut out without a change of its code or its names.

Each process keeps the transformers model and its forward, out of which positions, masks and rotary
tables come. What other processes have becomes a placeholder without parameters, in its place, so
the names of parameters stay those of the whole model. Two placeholders pass hidden states:

    stage 1 of 3, blocks [2, 4)    embedding  0  1      2  3  4        5     norm, head
                                   (zeros)       given        → passed       (what they get)

A process may hold several stages. Then its other blocks are passed over while one of them runs.

Only hidden states pass. A model whose blocks share more (keys and values of other blocks, positions
that are added to each) cannot be cut so. Its code does not say it, so it is tried: the stages of a
small random model must give the bits of the whole one.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.text import first_line

_TOKENS = 8


class CannotCutError(Exception):
    """A model cannot be cut into stages; the message says why."""


@dataclass(slots=True)
class Passage:
    """The hidden states that come into a stage of a pipeline and leave it, while a forward runs.

    count: blocks of the whole model
    blocks: those of the stage that runs; None = none does
    given: what comes from the stage before it, (B, T, h)
    passed: what the next one is given
    """

    count: int
    blocks: range | None = None
    given: Tensor | None = None
    passed: Tensor | None = None

    @contextmanager
    def through(self, blocks: range, given: Tensor | None) -> Iterator[None]:
        """Let a forward in this context be that of the stage with these blocks."""
        self.blocks, self.given, self.passed = blocks, given, None
        try:
            yield
        finally:
            self.blocks = self.given = None

    def run(self, decoder: nn.Module, ids: Tensor, keywords: Mapping[str, Any]) -> Tensor | None:
        """Return what a stage passes on; None, without a forward, for the last one."""
        if self.blocks is None or self.blocks.stop == self.count:
            return None
        decoder(ids, **keywords)
        return self.passed

    def at(self, number: int, hidden: Tensor) -> Tensor:
        """Return what the block behind this one is given, which is not of the stage that runs."""
        assert self.blocks is not None, "a cut model has a forward only as one of its stages"
        if number == self.blocks.start - 1:
            assert self.given is not None, "only the first stage is given nothing"
            return self.given
        if number == self.blocks.stop:
            self.passed = hidden
        return hidden


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a model is cut. All names are those of its modules.

    blocks: the list of its blocks
    before: modules with parameters that come before the blocks → the width of what an embedding
        returns, None for what returns as much as it is given
    after: modules with parameters behind the blocks, among them the head
    tuples: whether a block returns a tuple
    """

    blocks: str
    before: Mapping[str, int | None]
    after: Sequence[str]
    tuples: bool


def examine(model: Any) -> Anatomy:
    """Return where a model can be cut. Raises CannotCutError if it cannot be.

    model: a small model in evaluation mode, of transformers; it is used up
    """
    anatomy = anatomy_of(model)
    count = len(model.get_submodule(anatomy.blocks))
    if count < 2:
        return anatomy
    ids = _ids(model)
    halves = range(count // 2), range(count // 2, count)
    models = model, copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        hidden: Tensor | None = None
        try:
            for half, one in zip(halves, models, strict=True):
                passage = cut(one, anatomy, [half])
                with passage.through(half, hidden):
                    logits = one(ids, use_cache=False).logits
                hidden = passage.passed
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CannotCutError(f"its code fails on a stage: {first_line(error)}") from error
    if not torch.equal(logits, wanted):
        raise CannotCutError("more than hidden states passes from block to block")
    return anatomy


def cut(model: Any, anatomy: Anatomy, mine: Sequence[range]) -> Passage:
    """Keep of a bare model what the stages with these blocks need, in place.

    Returns what passes the hidden states of a forward: see `Passage.through`.
    """
    blocks = model.get_submodule(anatomy.blocks)
    passage = Passage(len(blocks))
    placeholders = [_Elsewhere(passage, n, one, anatomy.tuples) for n, one in enumerate(blocks)]
    held = {number for one in mine for number in one}
    modules = [one if n in held else placeholders[n] for n, one in enumerate(blocks)]
    model.set_submodule(anatomy.blocks, _Blocks(modules, placeholders, passage))
    if 0 not in held:
        # A head that is tied to the embedding keeps it, and so the name of its weight.
        is_last = len(blocks) - 1 in held
        tied = _ids_of([model.get_output_embeddings()]) if is_last else set()
        for name, width in anatomy.before.items():
            part = model.get_submodule(name)
            if not tied & _ids_of([part]):
                model.set_submodule(name, _Nothing(width, next(part.parameters()).dtype))
    if len(blocks) - 1 not in held:
        for name in anatomy.after:
            model.set_submodule(name, _Nothing())
    return passage


def own_tensors(model: Any, anatomy: Anatomy, mine: Sequence[range]) -> set[int]:
    """Return the ids of the parameters and buffers that the stages with these blocks answer for.

    model: the whole model

    Of several stages with the same tensor it is the first, as of a head that is tied to the
    embedding. The first stage also answers for what is in no block and not behind the blocks.
    """
    blocks = model.get_submodule(anatomy.blocks)
    before, after = (
        _ids_of(map(model.get_submodule, names)) for names in (anatomy.before, anatomy.after)
    )
    ids = _ids_of(blocks[number] for one in mine for number in one)
    if any(one.stop == len(blocks) for one in mine):
        ids |= after - before
    if any(one.start == 0 for one in mine):
        ids |= _ids_of([model]) - _ids_of(blocks) - (after - before)
    return ids


def tied_weight(model: Any) -> str | None:
    """Return the name of the weight that embedding and head share, if it is trained."""
    shared = _ids_of([model.get_input_embeddings()]) & _ids_of([model.get_output_embeddings()])
    named = model.named_parameters()
    return next((name for name, p in named if id(p) in shared and p.requires_grad), None)


def _ids_of(modules: Iterable[nn.Module]) -> set[int]:
    return {id(t) for one in modules for t in (*one.parameters(), *one.buffers())}


class _Elsewhere(nn.Module):
    """In place of a block that is not of the stage that runs."""

    def __init__(self, passage: Passage, number: int, block: nn.Module, tuples: bool) -> None:
        super().__init__()
        # What a model asks its blocks for, such as the kind of their attention.
        plain = (str, int, float, bool)
        for name, value in vars(block).items():
            if isinstance(value, plain) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._passage, self._number, self._tuples = passage, number, tuples

    def forward(self, hidden_states: Tensor, *_args: Any, **_keywords: Any) -> Any:
        passed = self._passage.at(self._number, hidden_states)
        return (passed,) if self._tuples else passed


class _Blocks(nn.ModuleList):
    """The blocks of a model, of which a forward sees those of one stage."""

    def __init__(
        self, modules: Sequence[nn.Module], placeholders: Sequence[nn.Module], passage: Passage
    ) -> None:
        super().__init__(modules)
        self._placeholders = [*placeholders]  # a list, so that they are no modules of this one
        self._passage = passage

    def _seen(self) -> list[nn.Module]:
        whole, blocks = list(super().__iter__()), self._passage.blocks
        if blocks is None:
            return whole
        return [one if n in blocks else self._placeholders[n] for n, one in enumerate(whole)]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._seen())

    def __getitem__(self, index: Any) -> Any:
        return self._seen()[index]


class _Nothing(nn.Module):
    """In place of a module of another stage, whose result nobody uses.

    width: of the zeros that it returns for ids; None = it returns what it is given
    """

    def __init__(self, width: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, given: Tensor, *_args: Any, **_keywords: Any) -> Tensor:
        if self._width is None:
            return given
        return torch.zeros(*given.shape, self._width, dtype=self._dtype, device=given.device)


def anatomy_of(model: Any) -> Anatomy:
    """Return where a model would be cut, from one forward of it. Raises CannotCutError."""
    name, blocks = list_of_blocks(model)
    outer = dict(_outside(model, name))
    calls: list[str] = []
    widths: dict[str, int | None] = {}
    tuples = False

    def seen(of: str) -> Any:
        def note(_module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            calls.append(of)
            first = given[0] if given else None
            same = isinstance(first, Tensor) and output.shape == first.shape
            widths[of] = None if same else output.shape[-1]

        return note

    def block(_module: nn.Module, _given: Any, output: Any) -> None:
        nonlocal tuples
        calls.append("")
        tuples = isinstance(output, tuple)

    with ExitStack() as hooks, torch.no_grad():
        for of, part in outer.items():
            hooks.enter_context(part.register_forward_hook(seen(of)))
        for one in blocks:
            hooks.enter_context(one.register_forward_hook(block))
        model(_ids(model), use_cache=False)
    if calls.count("") != len(blocks):
        raise CannotCutError("its blocks are not run once each")
    start, end = calls.index(""), len(calls) - calls[::-1].index("")
    if between := set(calls[start:end]) - {""}:
        raise CannotCutError(f"{min(between)} is used between its blocks")
    after = calls[end:]
    if both := set(calls[:start]) & set(after):
        raise CannotCutError(f"{min(both)} is used before its blocks and behind them")
    # What is not called has no gradient, wherever it is.
    first = {of: widths.get(of) for of in outer if of not in after}
    return Anatomy(name, first, tuple(dict.fromkeys(after)), tuples)


def list_of_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the list of a model's repeated blocks, with its name."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = {n: one for n, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    names = [n for n, one in lists.items() if any(type(part).__name__ in kinds for part in one)]
    if len(names) != 1:
        raise CannotCutError(f"its blocks are in {len(names)} lists")
    return names[0], lists[names[0]]


def _outside(model: nn.Module, blocks: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with parameters that are beside the list of blocks."""
    path = blocks.split(".")
    for depth in range(len(path)):
        above = ".".join(path[:depth])
        owner = model.get_submodule(above)
        if parameters := dict(owner.named_parameters(recurse=False)):
            raise CannotCutError(
                f"{min(parameters)} is a parameter of no block and no other module"
            )
        for name, part in owner.named_children():
            if name != path[depth] and any(True for _ in part.parameters()):
                yield f"{above}.{name}".lstrip("."), part


def _ids(model: Any) -> Tensor:
    vocabulary: int = model.config.get_text_config().vocab_size
    return torch.arange(_TOKENS)[None] % vocabulary
