r"""Runs a chat template, on a whole conversation and on its beginnings, in limited time.

Each turn of a conversation needs two texts: its prompt, and the text with its answer. To render
them all from the first message takes a time that grows as their square. Most templates are one loop
over the messages:

    {% for message in messages %} … {% endfor %}{% if add_generation_prompt %} … {% endif %}

So the conversation is rendered once, and at the beginning of each round of the loop it is noted
what had been written and what namespaces held. A beginning of k messages then leaves out the rounds
that wrote the same for it:

    run the template with messages[:k] up to the loop
    take what the left out rounds had written, set namespaces to what they had set
    run the other rounds, at least one, and what is behind the loop

This is exact, because a round is left out only if it would see nothing else than it saw: the items
that it asked for are noted, and whether it asked if it was the last. Where rounds look at more, or
a statement is not known (`rewrite`), all rounds run. They are counted: none goes on and on.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple, cast

import jinja2
from jinja2 import TemplateError, TemplateRuntimeError, Undefined, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llmtrain.types import JsonMapping, JsonObject

MANY = 64  # messages: from so many on it is a slow rendering that runs all rounds
# What a template raises when a message is not as it expects, besides jinja2's own errors.
FAILURES = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RuntimeError, MemoryError, NameError),
)
# Rounds in one rendering that are far more than a template needs; they take about a second.
_ROUNDS, _ROUNDS_A_MESSAGE = 5_000_000, 1_000
_KEPT_CHARACTERS = 1 << 26  # that namespaces held in all rounds, at most
_STATEFUL = ("cycler", "joiner", "lipsum")  # functions that give something else each time
_TURNS, _LOOK, _OVER, _TICK = "__turns", "__look", "__over", "__tick"  # names of no template
_NEVER_READ = {"messages", "add_generation_prompt", "loop"}  # by rounds that may be left out
_ALL = sys.maxsize  # messages: what a round needs that has seen how many there are
_SIZED = (str, list, tuple, dict)
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Text:
    """A text that may share its beginning with others.

    It is the first `shared` characters of `base`, then `own`.
    """

    base: str
    shared: int
    own: str

    def __len__(self) -> int:
        return self.shared + len(self.own)

    def __str__(self) -> str:
        return self.base[: self.shared] + self.own

    def part(self, start: int, stop: int) -> str:
        """Return the characters from `start` to `stop`."""
        first = self.base[start : min(stop, self.shared)]
        return first + self.own[max(0, start - self.shared) : max(0, stop - self.shared)]

    def until(self, stop: int) -> Text:
        """Return the first characters of this text."""
        return Text(self.base, min(self.shared, stop), self.own[: max(0, stop - self.shared)])

    def plus(self, more: str) -> Text:
        """Return this text with more behind it."""
        return Text(self.base, self.shared, self.own + more) if more else self

    def startswith(self, other: Text) -> bool:
        """Return whether this text begins with another one."""
        if not self.shared and not other.shared:
            return self.own.startswith(other.own)
        if len(other) > len(self):
            return False
        common = min(self.shared, other.shared) if self.base is other.base else 0
        return self.part(common, len(other)) == other.part(common, len(other))


class Conversation:
    """Renders the beginnings of a conversation.

    compiled: a template that was rewritten
    variables: all that it gets but messages and `add_generation_prompt`
    messages: as it gets them
    slow: whether the last text took all rounds of a long conversation
    """

    def __init__(
        self, compiled: jinja2.Template, variables: JsonMapping, messages: Sequence[JsonMapping]
    ) -> None:
        self.slow = False
        self._compiled = compiled
        self._variables = variables
        self._messages = list(messages)
        self._noted = _Noted()

    def render(self, count: int, add_generation_prompt: bool) -> Text:
        """Return the text of the first `count` messages. Raises what the template raises."""
        noted = self._noted
        if (count, add_generation_prompt) == (noted.count, False):
            return Text(noted.text, len(noted.text), "")
        run = _Run(self._compiled, self._messages[:count], noted)
        self._write(run, add_generation_prompt)
        self.slow = count > MANY and run.rounds > count // 2
        return Text(noted.text, run.shared, "".join(run.pieces))

    def note(self, count: int) -> None:
        """Render the first `count` messages and note the rounds, to leave them out later.

        What the template raises is not raised here, but when a text is rendered that has the cause.
        """
        run = _Run(self._compiled, self._messages[:count], None)
        whole = -1
        with suppress(TemplateError, *FAILURES):
            self._write(run, False)
            whole = count
        text = "".join(run.pieces)
        with suppress(UnicodeEncodeError):  # half a character is found where it is rendered
            text.encode()
            self._noted = _Noted(text, run.loops, whole)

    def _write(self, run: _Run, add_generation_prompt: bool) -> None:
        @pass_context
        def turns(context: Context, *given: Any) -> object:
            return run.turns(context.vars, *given)

        context = self._compiled.new_context({
            "namespace": run.namespace,
            **self._variables,
            "messages": run.messages,
            "add_generation_prompt": add_generation_prompt,
            _TURNS: turns,
            _LOOK: run.look,
            _OVER: run.over,
            _TICK: run.tick,
        })  # fmt: skip
        for piece in self._compiled.root_render_func(context):
            run.pieces.append(piece)
            run.length += len(piece)


@dataclass(slots=True)
class _Loop:
    """A loop over messages, as it was run on all that were noted.

    number: of the loop in the template
    first: the number of the message that it begins with
    written: characters before it
    variables: what its rounds may read, see `_Run.describe`
    starts: for each of its rounds, as long as they are noted, the characters that were written, and
        what each namespace held
    needs: for each round, how many messages there must be at least for it to see the same
    ended: whether its last round did
    """

    number: int
    first: int
    written: int
    variables: JsonObject
    starts: list[tuple[int, list[JsonObject]]] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    ended: bool = False
    closed: bool = False
    kept: int = 0

    def rounds_alike(self, count: int) -> int:
        """Return how many rounds at the beginning see the same with `count` messages.

        `needs` must not fall, see `_Noted`.
        """
        whole = len(self.needs) if self.ended else len(self.needs) - 1
        return max(0, min(bisect_right(self.needs, count), whole, len(self.starts) - 1))


class _Noted:
    """What is noted of a rendering: its text, and the loops over messages in it.

    count: of its messages; -1 = it failed, and the text is what had been written
    """

    def __init__(self, text: str = "", loops: Sequence[_Loop] = (), count: int = -1) -> None:
        self.text = text
        self.loops = loops
        self.count = count
        for loop in loops:  # a round is left out with those before it
            loop.needs = list(accumulate(loop.needs, max))


class _Mark(NamedTuple):
    """What stands for a value that differs from one rendering to the next, but not in its sense."""

    kind: str
    what: Any = None


class _Run:
    """One rendering.

    messages: all that it gets
    noted: rounds that may be left out; None = it is noted itself
    shared: characters of the noted text that its own begins with
    pieces: what it has written behind them; `length`, of both
    rounds: of all its loops, and calls of macros
    """

    def __init__(
        self, compiled: jinja2.Template, messages: list[JsonMapping], noted: _Noted | None
    ) -> None:
        self.messages = messages
        self.loops: list[_Loop] = []
        self.pieces: list[str] = []
        self.shared = self.length = self.rounds = 0
        self._noted = noted
        self._environment = compiled.environment
        self._limit = _ROUNDS + _ROUNDS_A_MESSAGE * len(messages)
        self._namespaces: list[Namespace] = []
        self._met = 0  # loops
        self._firsts: dict[int, tuple[Any, int | None]] = {}

    def namespace(*args: Any, **kwargs: Any) -> Namespace:  # an attribute may be called self
        """Return a namespace for the template."""
        run, *given = args
        made: Namespace = run._environment.globals["namespace"](*given, **kwargs)
        run._namespaces.append(made)
        return made

    def tick(self, rounds: int = 1) -> None:
        """Count rounds. Raises TemplateError for more than any template needs."""
        self.rounds += rounds
        if self.rounds > self._limit:
            raise TemplateRuntimeError(f"it loops more than {self._limit:,} times")

    def over(self, value: object) -> object:
        """Return what a loop runs over, so that its rounds are counted."""
        if isinstance(value, list | tuple | dict | str):
            self.tick(len(value))
            return value
        return self._counted(value) if isinstance(value, Iterable) else value

    def _counted(self, value: Iterable[object]) -> Iterator[object]:
        for one in value:
            self.tick()
            yield one

    def look(self, value: Any, key: Any) -> Any:
        """Return the item of a value that a round asks for."""
        if self._noted is None and self.loops and (first := self.first_of(value)) is not None:
            exists = type(key) is int and 0 <= key < len(value)
            self.saw(self.loops[-1], first + key + 1 if exists else _ALL)
        return self._environment.getitem(value, key)

    def turns(
        self,
        variables: JsonMapping,
        value: Any,
        number: int,
        read: Sequence[str],
        asked: Sequence[str],
    ) -> Any:
        """Return what a loop runs over.

        variables: that the template has set
        value: what the template runs over
        number: of the loop
        read: names of what its rounds may read
        asked: names of what they only take items of
        """
        first = self.first_of(value)
        if first is None:
            return self.over(value)
        variables = {
            name: self.describe(variables[name], items=name in asked)
            for name in (*read, *asked)
            if name in variables
        }
        if self._noted is None:
            self.tick(len(value))
            self.loops.append(_Loop(number, first, self.length, variables))
            return _Rounds(value, 0, self, self.loops[-1])
        self._met += 1
        if self._met > len(self._noted.loops):
            return self.over(value)
        loop = self._noted.loops[self._met - 1]
        skipped = min(loop.rounds_alike(len(self.messages)), len(value) - 1)
        if skipped <= 0 or not self._is_before(loop, number, first, variables):
            return self.over(value)
        self.tick(len(value) - skipped)
        self.shared, held = loop.starts[skipped]
        self.length = self.shared
        self.pieces.clear()
        for namespace, values in zip(self._namespaces, held, strict=True):
            for name, one in values.items():
                namespace[name] = one
        return _Rounds(value, skipped)

    def _is_before(self, loop: _Loop, number: int, first: int, variables: JsonObject) -> bool:
        """Return whether the template has come to a loop with all as it was noted."""
        assert self._noted is not None
        if (loop.number, loop.first, loop.written) != (number, first, self.length):
            return False
        written = "".join(self.pieces)
        return (
            self._noted.text.startswith(written, self.shared)
            and _same(variables, loop.variables)
            and _same(self._held(), loop.starts[0][1])
        )

    def begin(self, loop: _Loop, number: int) -> None:
        """Note that a round begins."""
        loop.needs.append(loop.first + number + 1)
        held = self._held()
        if loop.starts:  # namespaces that a round has made end with it, unless one of these has one
            held = held[: len(loop.starts[0][1])]
        before = loop.starts[-1][1] if loop.starts else [{}] * len(held)
        for new, old in zip(held, before, strict=False):
            changed = (value for name, value in new.items() if value is not old.get(name))
            loop.kept += sum(len(one) for one in changed if isinstance(one, _SIZED))
        loop.closed |= loop.kept > _KEPT_CHARACTERS or not all(map(_is_plain, held))
        if not loop.closed:
            loop.starts.append((self.length, held))

    def saw(self, loop: _Loop, count: int) -> None:
        """Note that the round sees the same only if there are so many messages."""
        if loop.needs:
            loop.needs[-1] = max(loop.needs[-1], count)

    def first_of(self, value: object) -> int | None:
        """Return the n of which a value is the list `messages[n:]`; None if it is none."""
        if value is self.messages:
            return 0
        if type(value) is not list or len(value) > len(self.messages):
            return None
        if id(value) not in self._firsts:
            first = len(self.messages) - len(value)
            same = all(map(is_, value, self.messages[first:]))
            self._firsts[id(value)] = value, first if same else None  # kept, so that its id is
        return self._firsts[id(value)][1]

    def describe(self, value: object, *, items: bool) -> object:
        """Return what can be compared with the same variable of another rendering.

        items: whether only single items are taken of it, which are noted
        """
        if isinstance(value, cast("type", self._environment.globals["namespace"])):
            return _Mark("namespace", [one is value for one in self._namespaces])
        if isinstance(value, Macro):
            return _Mark("macro", value.name)
        if isinstance(value, Undefined):
            return _Mark("undefined")
        if items and (first := self.first_of(value)) is not None:
            return _Mark("messages", first)
        return value

    def _held(self) -> list[JsonObject]:
        """Return what each namespace holds."""
        return [dict(object.__getattribute__(one, "held")) for one in self._namespaces]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The rounds of a loop over messages, without those that are left out.

    loop: where they are noted; None = they are not
    """

    items: list[object]
    skipped: int
    run: _Run | None = None
    loop: _Loop | None = None

    def __iter__(self) -> Iterator[object]:
        for number in range(self.skipped, len(self.items)):
            self.begin(number)
            yield self.items[number]
        self.begin(len(self.items))

    def begin(self, number: int) -> None:
        """Note that a round begins, or that the loop has ended."""
        if self.loop is not None and self.run is not None:
            self.loop.ended = number == len(self.items)
            if not self.loop.ended:
                self.run.begin(self.loop, number)

    def saw(self, number: int) -> None:
        """Note that a round has asked if there is one of that number."""
        if self.loop is not None and self.run is not None:
            exists = number < len(self.items)
            self.run.saw(self.loop, self.loop.first + number + 1 if exists else _ALL)


def rewrite(tree: nodes.Template) -> None:
    """Change a parsed template so that its rounds are counted, and those of loops can be left out.

    They can in loops that are no part of another, if all is known that their rounds read. It is not
    with blocks, includes or functions that give something else each time, nor where a round takes
    more of the messages than single items.
    """
    macros: list[Any] = list(tree.find_all(nodes.Macro))
    counted = set()
    for number, loop in enumerate(_outer_loops(tree.body) if _is_known(tree) else ()):
        lists = {"messages"} | (_assigned([tree]) - _assigned(loop.body))
        items, rest = _names(loop.body)
        read = rest | items - lists | set().union(*_names(macros))
        asked = items - read
        if loop.recursive or loop.test is not None or read & _NEVER_READ:
            continue
        loop.body = [_Look(asked).visit(node) for node in loop.body]
        known = (number, tuple(sorted(read)), tuple(sorted(asked)))
        loop.iter = _call(_TURNS, [loop.iter, *map(nodes.Const, known)], loop.lineno)
        counted.add(loop)
    for loop in tree.find_all(nodes.For):
        if loop not in counted:
            loop.iter = _call(_OVER, [loop.iter], loop.lineno)
    again: list[Any] = [loop for loop in tree.find_all(nodes.For) if loop.recursive]
    for node in (*macros, *again):
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, [], node.lineno), lineno=node.lineno))


class _Turns(LoopContext):
    """`loop` of a loop over messages: it notes what a round asks about the others."""

    def __init__(self, rounds: _Rounds, undefined: Callable[[str], Any]) -> None:
        super().__init__(rounds.items[rounds.skipped :], undefined)  # type: ignore[arg-type]
        self._rounds, self._none = rounds, undefined
        self.index0 = rounds.skipped - 1

    def __next__(self) -> tuple[Any, LoopContext]:
        self._rounds.begin(self.index0 + 1)
        return super().__next__()

    @property
    def length(self) -> int:
        self._rounds.saw(len(self._rounds.items))
        return len(self._rounds.items)

    @property
    def last(self) -> bool:
        self._rounds.saw(self.index0 + 1)
        return self.index0 + 1 == len(self._rounds.items)

    @property
    def previtem(self) -> object:
        if self.first:
            return self._none("there is no previous item")
        return self._rounds.items[self.index0 - 1]

    @property
    def nextitem(self) -> object:
        if self.last:
            return self._none("there is no next item")
        return self._rounds.items[self.index0 + 1]


def loop_context(iterable: Any, undefined: Any, *more: Any) -> LoopContext:
    """Make the variable `loop` of a loop of a compiled template, in place of `LoopContext`."""
    if isinstance(iterable, _Rounds):
        return _Turns(iterable, undefined)
    return LoopContext(iterable, undefined, *more)


def _is_known(tree: nodes.Template) -> bool:
    others = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
    return (
        not any(tree.find(kind) for kind in others)
        and not any(one.name in _STATEFUL for one in tree.find_all(nodes.Name))
        and not any(one.name == "random" for one in tree.find_all(nodes.Filter))
        and not any(one.attr == "changed" for one in tree.find_all(nodes.Getattr))
        and not any(one.value == "changed" for one in tree.find_all(nodes.Const))
    )


def _outer_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    """Yield the loops of a template's outermost level, and of conditions there."""
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        if isinstance(node, nodes.If):
            yield from _outer_loops([*node.body, *node.elif_, *node.else_])


def _assigned(body: Iterable[nodes.Node]) -> set[str]:
    """Return the names to which something is assigned, loop variables excepted."""
    kinds = (nodes.Assign, nodes.AssignBlock)
    candidates = [one for node in body for one in (node, *node.find_all(kinds))]
    targets = [one.target for one in candidates if isinstance(one, kinds)]
    names = [name for one in targets for name in (one, *one.find_all(nodes.Name))]
    return {one.name for one in names if isinstance(one, nodes.Name)}


def _names(body: Iterable[nodes.Node]) -> tuple[set[str], set[str]]:
    """Return the names of which items are taken, and those that are read in another way.

    What is asked of `loop` is noted when it is asked, so it counts only where it is passed on.
    """
    items: set[str] = set()
    rest: set[str] = set()
    for node in body:
        if isinstance(node, nodes.Name):
            rest.add(node.name)
            continue
        if isinstance(node, nodes.NSRef):
            rest.add(node.name)
        children = list(node.iter_child_nodes())
        if isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name):
            name, children = node.node.name, children[1:]
            if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
                items.add(name)
            elif name != "loop" or isinstance(node, nodes.Getitem):
                rest.add(name)
        for names, more in zip((items, rest), _names(children), strict=True):
            names |= more
    return items, rest


class _Look(NodeTransformer):
    """Rewrites a loop, so that what its rounds take of these names, item by item, is noted."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 (as jinja2 does)
        self.generic_visit(node)
        if not isinstance(node.node, nodes.Name) or node.node.name not in self._names:
            return node
        return _call(_LOOK, [node.node, node.arg], node.lineno)


def _call(name: str, arguments: list[Any], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None, lineno=line)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values cannot be told apart by a template."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) in _PLAIN and bool(one == other)


def _is_plain(value: object) -> bool:
    """Return whether a value never changes, and holds none that does."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
