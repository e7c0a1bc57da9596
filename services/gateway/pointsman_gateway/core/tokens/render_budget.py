"""Bounds the work of rendering a chat template, while it is done: characters and steps, whatever the template and the body.

A template multiplies what a client sends: `tojson(indent=4)` writes up to 260 characters for a byte of a body nested 128 deep,
and a loop over `messages[loop.index:]` takes half the square of the number of messages. MeteredEnvironment compiles a template so
that each iteration, text and copy is charged to the Meter of the rendering, which ends it by an exception.

Sums, products, `tojson` and joined texts are charged before they can grow far beyond a limit; results of other single filters
and methods afterwards. So a template whose author means harm can exceed the limits (`2 ** 9999999`, `text.replace('a', text)`,
the text of a list that contains a list many times). They bound what clients can make of other templates.
"""

from __future__ import annotations

import functools
import json
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from pointsman_gateway.core.api.decode_body import memory_left
from pointsman_gateway.core.pauses import ITEMS, pause

# Limits of a rendering in a thread. Characters of a prompt, whatever the context: more than a body of the default maximum has.
# A template that loops ten times over as many objects as a body may have takes 1.3 million steps.
MAX_TEXT, MAX_STEPS = 1 << 25, 1 << 22
# Limits of a rendering on the event loop, where it takes at most some 8 ms.
LIGHT_TEXT, LIGHT_MADE, LIGHT_STEPS = 1 << 20, 1 << 23, 12 << 10
# A text may pass through so many copies (concatenations, macros, filters) on its way to the prompt, on average.
_COPIES = 16
# Items of a list that are copied or compared in the time of one iteration.
_ITEMS_A_STEP = 16
# Parts of a prompt that are kept apart: each takes some 60 bytes beside its characters.
_PARTS = 256
# Size of a text's object that is not ASCII, bytes.
_WIDE_TEXT_BYTES = 72
_TEXT = frozenset({str})
_DICT_ATTRIBUTES = frozenset(dir(dict))
# Filters that take the same time for any text or list, and make none. Qwen's templates ask for the length of the list of messages
# at each message.
_CONSTANT = frozenset({"length", "count", "first", "last", "default", "d"})
_STEP, _SCANNED, _JOINED, _ADDED = (f"_pointsman_{name}" for name in ("step", "scanned", "joined", "added"))


class Unrenderable(Exception):
    """A prompt's tokens cannot be computed outside the engine."""


class OverBudget(Unrenderable):
    """A rendering was ended. `characters`: length of a text that exceeds RenderLimits.text or part; 0 if another limit was
    exceeded."""

    def __init__(self, what: str, characters: int = 0) -> None:
        super().__init__(f"the prompt has too many {what}")
        self.characters = characters


@dataclass(slots=True)  # frozen ones take 2 us longer to make
class RenderLimits:
    """`text`: characters of the prompt. `part`: of each text on the way to it, if that is more: a template may drop a text that
    is a part of the body. `memory`: bytes that the prompt, a text on the way to it, and what the body is converted to may take.
    `made`: characters of all texts together. `steps`: iterations, calls, and items of lists that are copied. `light`: on the
    event loop. `quick`: there is memory for another copy of the body's values."""

    text: int = MAX_TEXT
    part: int = 0
    memory: int = sys.maxsize
    made: int = MAX_TEXT * _COPIES
    steps: int = MAX_STEPS
    light: bool = False
    quick: bool = False


def thread_limits(most: int, body_bytes: int, decoded_bytes: int) -> RenderLimits:
    """Return the limits in a thread for a prompt of at most `most` characters (0: unknown) from a body of so many bytes, whose
    values take `decoded_bytes` of memory."""
    memory = memory_left(body_bytes, decoded_bytes)
    return RenderLimits(min(most or MAX_TEXT, MAX_TEXT), min(body_bytes, MAX_TEXT), memory)


def light_limits(most: int, body_bytes: int, decoded_bytes: int) -> RenderLimits:
    """As thread_limits(), on the event loop."""
    memory = memory_left(body_bytes, decoded_bytes)
    text, part = min(most or MAX_TEXT, LIGHT_TEXT), min(body_bytes, LIGHT_TEXT)
    return RenderLimits(text, part, memory, LIGHT_MADE, LIGHT_STEPS, True, memory >= decoded_bytes)


class Meter:
    """What one rendering may still spend."""

    __slots__ = ("light", "longest", "made", "memory", "part", "quick", "steps", "text")

    def __init__(self, limits: RenderLimits) -> None:
        self.text, self.made, self.steps, self.light = limits.text, limits.made, limits.steps, limits.light
        self.memory, self.quick = limits.memory, limits.quick
        # Of a longer text the characters are counted, but it is not kept.
        self.longest = max(limits.part, limits.text)
        self.part = min(self.longest, self.memory // 2)

    def take(self, characters: int) -> None:
        """Charge a text that was made. Raises OverBudget. Mutates."""
        self.made -= characters
        if self.made < 0 or characters > self.part:
            self.exceeded(characters)

    def exceeded(self, characters: int) -> NoReturn:
        """Raises OverBudget for a text that was charged."""
        if characters > self.part:
            raise OverBudget("characters", characters)
        raise OverBudget("copies of its characters")

    def hold(self, size: int) -> None:
        """Charge bytes of memory that are kept while the prompt is rendered. Raises OverBudget. Mutates."""
        self.memory -= size
        if self.memory < 0:
            raise OverBudget("objects")
        self.part = min(self.part, self.memory // 2)

    def step(self, count: int = 1) -> None:
        """Charge iterations. Raises OverBudget. Mutates."""
        self.steps -= count
        if self.steps < 0:
            raise OverBudget("steps")


class _Current(threading.local):
    """The meter of the rendering in this thread. Compiling a template evaluates its constants without limits."""

    meter = Meter(RenderLimits(sys.maxsize, sys.maxsize, sys.maxsize, sys.maxsize, sys.maxsize))


_current = _Current()


@contextmanager
def metered(limits: RenderLimits) -> Iterator[Meter]:
    """Charge what is rendered in this thread inside the block to a new meter."""
    before = _current.meter
    _current.meter = meter = Meter(limits)
    try:
        yield meter
    finally:
        _current.meter = before


def hold(size: int) -> None:
    """Charge `size` bytes of memory to the current meter (Meter.hold)."""
    _current.meter.hold(size)


def whole_text(parts: Iterable[str], meter: Meter) -> str:
    """Return the joined `parts` of a prompt as the template yields them. Raises OverBudget as soon as they are too long. If they
    only take too much memory it counts all their characters before, unless the rendering is light."""
    joined: list[str] = []
    some: list[str] = []
    length, width = 0, 1
    room = meter.memory // 2
    for part in parts:
        length += len(part)
        if not part.isascii():
            # The whole text has the width of its widest character.
            width = max(width, (sys.getsizeof(part) - _WIDE_TEXT_BYTES) // len(part))
            room = meter.memory // (width + 1)
        if length > meter.text or (length > room and meter.light):
            raise OverBudget("characters", length)
        some.append(part)
        if length > room:
            joined.clear()
            some.clear()
        elif len(some) == _PARTS:
            joined.append("".join(some))
            some.clear()
    if length > room:
        raise OverBudget("characters", length)
    return "".join(joined + some)


def _join(parts: list[str]) -> str:
    _current.meter.take(sum(map(len, parts)))
    return "".join(parts)


def _take(value: object) -> None:
    if type(value) is str:
        meter = _current.meter
        meter.made -= len(value)
        if meter.made < 0 or len(value) > meter.part:
            meter.exceeded(len(value))
    elif type(value) is list:
        _current.meter.step(len(value))


@jinja2.pass_context  # with a context jinja2 does not evaluate it as a constant
def _step(_: jinja2.runtime.Context, value: object) -> None:
    meter = _current.meter
    meter.steps -= 1
    if not meter.steps % ITEMS:
        pause()
    if meter.steps < 0:
        meter.step()


def _scanned(value: Any) -> Any:
    """Charge a text or list that was copied, or is searched."""
    if type(value) is list:
        _current.meter.step(len(value) // _ITEMS_A_STEP)
    elif type(value) is str:
        _current.meter.take(len(value))
    return value


def _joined(values: list[Any]) -> str:
    return _join(list(map(str, values)))


def _added(values: list[Any]) -> Any:
    """Return the sum of two or more values. One charge for all is cheaper than one for each `+`."""
    made: Any = "".join(values) if _TEXT.issuperset(map(type, values)) else functools.reduce(operator.add, values)
    _take(made)
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    meter = _current.meter
    form: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent}
    form |= {"separators": separators, "sort_keys": sort_keys}
    if indent is None and meter.quick:
        # At most six times the bytes of a light body. This is ten times as fast, and takes some 60 bytes for each value.
        written = json.dumps(value, **form)
        meter.take(len(written))
        return written
    # iterencode() lets other threads run, and ends with the loop. Each of its parts has at least one character. An encoder that
    # is left early would refer, in a cycle, to what it checks for circles, and values that were JSON have none.
    most = min(meter.part if meter.light else meter.longest, meter.made)
    joined: list[str] = []
    some: list[str] = []
    length = 0
    for part in json.JSONEncoder(check_circular=False, **form).iterencode(value):
        length += len(part)
        if length > most:
            meter.take(length)
        some.append(part)
        if len(some) == _PARTS:
            pause()
            meter.step(_PARTS)
            if length <= meter.part:
                joined.append("".join(some))
            some.clear()
    meter.take(length)
    meter.step(len(some))
    return "".join(joined + some)


def _metered_filter(own: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if hasattr(own, "jinja_pass_arg") else 0

    @functools.wraps(own)
    def charged(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            _take(args[at])
        made = own(*args, **kwargs)
        _take(made)
        return made

    return charged


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox that vLLM renders in, whose templates charge the current meter. It has a short way for `message.role`: the
    sandbox looks for an attribute of that name first, and raises and catches an AttributeError for each key of each message."""

    intercepted_binops = frozenset({"*"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: own if name in _CONSTANT else _metered_filter(own) for name, own in self.filters.items()}
        self.filters |= {"tojson": _tojson, _STEP: _step, _SCANNED: _scanned, _JOINED: _joined, _ADDED: _added}

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template. Raises jinja2.TemplateError."""
        tree = self.parse(source)
        _charge(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Return the text of a macro or a block."""
        return _join(parts if isinstance(parts, list) else list(parts))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _current.meter.step()
        made = super().call(context, obj, *args, **kwargs)
        _take(made)
        return made

    def call_binop(self, context: jinja2.runtime.Context, sign: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                _current.meter.take(len(one) * max(other, 0))
        return super().call_binop(context, sign, left, right)


def _charge(node: jinja2.nodes.Node) -> None:
    """Make what is below `node` charge the current meter: iterations, sums, `~`, copied slices and searches. Mutates it."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_charged(item) for item in value])
        else:
            setattr(node, name, _charged(value))


def _charged(node: Any) -> Any:
    if not isinstance(node, jinja2.nodes.Node):
        return node
    _charge(node)
    if isinstance(node, jinja2.nodes.For):
        node.body.insert(0, jinja2.nodes.ExprStmt(_filter(jinja2.nodes.Const(None), _STEP, node), lineno=node.lineno))
        if node.test is not None:
            step = _filter(jinja2.nodes.Const(None), _STEP, node)
            node.test = jinja2.nodes.And(jinja2.nodes.Not(step), node.test, lineno=node.lineno)
    elif isinstance(node, jinja2.nodes.Operand) and node.op in ("in", "notin"):
        node.expr = _filter(node.expr, _SCANNED, node)
    elif isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
        return _filter(node, _SCANNED, node)
    elif isinstance(node, jinja2.nodes.Concat):
        return _filter(jinja2.nodes.List(node.nodes), _JOINED, node)
    elif isinstance(node, jinja2.nodes.Add):
        return _filter(jinja2.nodes.List([*_terms(node.left), node.right]), _ADDED, node)
    return node


def _terms(left: jinja2.nodes.Expr) -> list[jinja2.nodes.Expr]:
    """Return the terms of a sum whose `left` side has been replaced."""
    if isinstance(left, jinja2.nodes.Filter) and left.name == _ADDED and isinstance(left.node, jinja2.nodes.List):
        return left.node.items
    return [left]


def _filter(value: jinja2.nodes.Expr, name: str, at: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)
