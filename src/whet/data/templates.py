"""Chat templates, rendered within limits: a template is a program from outside, and may loop or grow without end.

Jinja's sandbox keeps a template from reaching Python's insides. It does not keep it from running for hours or filling
the memory, so here every loop, call, filter and operator is charged for what it works on, and a template that has used
up MOST_WORK, or makes a text of more than MOST_TEXT characters, is refused. The count is of work, not of seconds: the
same template is refused on every machine, or on none. What is in reach of a template is what transformers puts there.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time
from functools import lru_cache, wraps
from math import prod
from typing import Any

from jinja2 import Template, meta, nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_sum
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from whet.types import Json

MOST_WORK = 200_000_000
"""Of one rendering, in characters worked on: a second or a few. What else is done counts as so many characters:"""
TURN, ENTRY, CALL = 20, 100, 2000
"""A turn of a loop (as much for each node of its body; its text, too), an entry of a list that is read, a call."""
MOST_TEXT = 20_000_000
"""Characters, or entries of lists, of any one value."""
MOST_BITS = 4096
"""Of a whole number."""

_GROWING = frozenset(
    ("replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch",
     "slice", "tojson", "wordwrap", "round", "range", "truncate", "translate")
)  # fmt: skip
"""Functions and filters whose result may have the product of the sizes of what they are given."""
_FORMATS = frozenset(("format", "format_map", "%", "strftime_now"))
"""Those whose result follows from the places in a text and the widths of these."""
_PLACE, _WIDTH = re.compile("[%{]"), re.compile(r"\d+")
_INNER = re.compile(r"\{[^{}]+\{")
_GIVEN_WIDTH = {"%": re.compile(r"%[-+ #0-9.]*\*"), "format": _INNER, "format_map": _INNER}
"""A width that is not in the text itself, but in what is put there."""
_QUICK_FILTERS = frozenset(("length", "count", "first", "last", "default", "d"))
_QUICK_TESTS = frozenset(
    ("defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping",
     "sequence", "iterable", "callable", "sameas")
)  # fmt: skip
"""Those that do not go through what they are given, and make nothing new. Templates ask for the length of all messages
at each of them."""
_UNSAFE = frozenset(("encode", "to_bytes", "from_bytes"))
"""Methods that no template needs: bytes are not weighed, and some encodings take the square of the length."""

CUT = "\U00010137"
"""Parts a control token's text in what a template is given (`data.chat.parted`): a sign that is hardly ever written.
Where a text has it, it stands twice. It is printable, so Python's repr, which some templates use, leaves it."""
MARK = f"\U00010138{CUT}\U00010139"
"""Stands for a reply. No text has it once its cuts are doubled: a cut stands in it alone."""
_NOT_ASCII = re.compile(rf"{CUT}{CUT}|{MARK}|[^\x00-\x7f]")


class TooMuch(SecurityError):
    """A template exceeded a limit."""


_spent = threading.local()


def _charge(work: int) -> None:
    _spent.work = getattr(_spent, "work", 0) + work
    if _spent.work > MOST_WORK:
        raise TooMuch(
            f"it has not finished after processing {MOST_WORK} characters; is there an endless loop?"
        )


def _weigh(value: object) -> int:
    """Characters and entries in a value, charged while they are counted."""
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, int):
        size = value.bit_length() // 8
        if value.bit_length() > MOST_BITS:
            raise TooMuch(f"it creates a number that is too large, of more than {MOST_BITS} bits")
    else:
        return _weigh_inside(value)
    _charge(size + ENTRY)
    if size > MOST_TEXT:
        raise TooMuch(f"it produces more than {MOST_TEXT} characters")
    return size + 1


def _weigh_inside(value: object) -> int:
    size, inside = 0, [value]
    while inside:
        one = inside.pop()
        here = 1
        if isinstance(one, list | tuple | set | frozenset):
            inside += one
            here += len(one)
        elif isinstance(one, dict):
            inside += [*one.keys(), *one.values()]
            here += 2 * len(one)
        _charge(here * ENTRY)
        size += len(one) if isinstance(one, str) else 1
        if size > MOST_TEXT:
            raise TooMuch(f"it creates a value of more than {MOST_TEXT} characters and entries")
    return size


def _admit(name: str, given: Iterable[object]) -> None:
    """Charge for what a function or filter is given, and foresee what it may make of it."""
    given = list(given)
    _charge(CALL)
    weights = [_weigh(v) for v in given]
    if (name in _GROWING and _multiplies(given, weights)) or (
        name in _FORMATS and _fills(name, given, weights)
    ):
        raise TooMuch(f"{name} would create a text of more than {MOST_TEXT} characters")


def _multiplies(given: list[object], weights: list[int]) -> bool:
    """Whether the result may be too large: a number beside the value may be a width, and each part of a text may be
    replaced."""
    sizes = [abs(v) if n and isinstance(v, int) else w for n, (v, w) in enumerate(zip(given, weights))]
    return max(sizes, default=0) > MOST_TEXT or prod(max(1, s) for s in sizes) > 100 * MOST_TEXT


def _fills(name: str, given: list[object], weights: list[int]) -> bool:
    """Whether a format of too great widths, or with too much in its places, is asked for."""
    if not given or not isinstance(given[0], str):
        return False
    text = given[0].replace("{{", "").replace("}}", "")
    widths = sum(min(int(width[:9]), MOST_TEXT + 1) for width in _WIDTH.findall(text))
    if name in _GIVEN_WIDTH and _GIVEN_WIDTH[name].search(text):
        return True
    return len(text) + widths + len(_PLACE.findall(text)) * sum(weights[1:]) > MOST_TEXT


def _bounded(name: str, function: Any, *, quick: bool) -> Callable[..., Any]:
    """A filter or test that is charged for what it is given and what it gives, or, quick, for being called."""

    first = int(hasattr(function, "jinja_pass_arg"))  # before the value, where the environment is asked for

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        if quick:
            _charge(CALL)
            return function(*args, **kwargs)
        _admit(name, (*args[first:], *kwargs.values()))
        made = function(*args, **kwargs)
        _weigh(made)
        return made

    return charged


def _turns(items: Any, body: int) -> Any:
    """The items of a loop, each charged for its turn."""
    if hasattr(items, "__len__"):
        _charge(len(items) * TURN * body)
        return items
    return _one_by_one(items, body)


def _one_by_one(items: Iterable[Any], body: int) -> Iterator[Any]:
    for item in items:
        _charge(TURN * body)
        yield item


def _weighed(value: Any) -> Any:
    _weigh(value)
    return value


def _cut(value: Any) -> Any:
    """A part of a text or list, which has been copied."""
    _charge(len(value) if hasattr(value, "__len__") else 0)
    return value


TURNS, WEIGHED, CUT_OUT = "the iterations of a loop", "a weighed value", "a part"
"""Filters that no template can name."""


class _Charged(NodeTransformer):
    """Puts the charges for loops, comparisons, concatenation, slices and values in brackets into a template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        body = sum(1 for _ in node.find_all(nodes.Node)) + text // TURN
        node.iter = nodes.Filter(node.iter, TURNS, [nodes.Const(body)], [], None, None, lineno=node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _weighed_node(node.expr)
        for operand in node.ops:
            operand.expr = _weighed_node(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_weighed_node(part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        sliced = isinstance(node.arg, nodes.Slice)
        return nodes.Filter(node, CUT_OUT, [], [], None, None, lineno=node.lineno) if sliced else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Expr:
        """Weighed, or a few pairs of pairs would be a value of 2**60 entries, for whoever goes through it."""
        self.generic_visit(node)
        return _weighed_node(node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _weighed_node(node) if node.ctx == "load" else node


def _weighed_node(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, WEIGHED, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """{% generation %} marks the assistant's text; the text is rendered as is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """What outlives a turn of a loop: weighed, and without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call a name `self`
        self, given = args[0], dict(*args[1:], **kwargs)
        for name, value in given.items():
            _check_kept(name, value)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_kept(name, value)
        Namespace.__setitem__(self, name, value)


def _check_kept(name: object, value: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names in a namespace must not begin with an underscore: {name!r}")
    _weigh(value)


class _Environment(ImmutableSandboxedEnvironment):
    """The surroundings that transformers gives to chat templates, with every operation charged."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_weighed,
            optimized=False,
        )
        own = {**self.filters, "tojson": _tojson, "sum": _sum}
        del own["random"]
        self.filters = {
            name: _bounded("%" if name == "format" else name, f, quick=name in _QUICK_FILTERS)
            for name, f in own.items()
        }
        self.filters |= {TURNS: _turns, WEIGHED: _weighed, CUT_OUT: _cut}
        self.tests = {
            name: _bounded(name, test, quick=name in _QUICK_TESTS) for name, test in self.tests.items()
        }
        del self.globals["lipsum"]  # random text, as the filter's
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": strftime_now,
            "namespace": _Namespace,
            "dict": _dict,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Charged().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return _weighed(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        own = () if isinstance(function, Macro) else (getattr(method, "__self__", None),)
        _admit(getattr(function, "__name__", ""), (*own, *args, *kwargs.values()))
        return _weighed(super().call(context, function, *args, **kwargs))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse what would take long or much before it is computed."""
    weights = _weigh(left), _weigh(right)
    whole = [v for v in (left, right) if isinstance(v, int)]
    if operator == "%":
        too_much = isinstance(left, str) and _fills("%", [left, right], [*weights])
    elif len(whole) == 2:
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        too_much = operator != "+" and bits > MOST_BITS
    else:
        too_much = operator == "*" and len(whole) == 1 and abs(whole[0]) * max(weights) > MOST_TEXT
    if too_much:
        raise TooMuch(f"the result of {operator} would be too large")


def _raise(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _clock(moment: datetime) -> Callable[[str], str]:
    """A `strftime_now` that stands still."""

    def strftime_now(form: str) -> str:
        return moment.strftime(form)

    return strftime_now


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


@pass_environment
def _sum(environment: Any, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's, charged for lists and texts: each addition copies what there is so far."""
    every = list(items)
    if not isinstance(start, int | float):
        _charge(len(every) * _weigh(every) // TURN)
    return do_sum(environment, every, attribute, start)


def _escaped(found: re.Match[str]) -> str:
    """As JSON in ASCII, but for cuts and marks."""
    text = found.group()
    return text if text in (CUT, MARK) else json.dumps(text[0])[1:-1]


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _Environment().from_string(template)


@lru_cache(maxsize=64)
def variables(template: str) -> frozenset[str]:
    """The names that a chat template reads and does not set before; of a malformed one all its words."""
    try:
        return frozenset(meta.find_undeclared_variables(_Environment().parse(template)))
    except (TemplateError, RecursionError):  # rendering tells what is wrong with it
        return frozenset(re.findall(r"\w+", template))


def asks_for_date(template: str) -> bool:
    """Whether a chat template may write today's date."""
    return "strftime_now" in template


def rendered(template: str, *, day: date | None = None, **variables: Any) -> str:
    """What a chat template makes of its variables. day: what it is told is today; None: what today is.

    Errors: TemplateError for one that is malformed, refuses what it is given, or goes over a limit; it may raise
    anything else that its expressions do.
    """
    _spent.work = 0
    parts, size = [], 0
    if day is not None:
        variables["strftime_now"] = _clock(datetime.combine(day, time.min))
    for part in _compiled(template).generate(**variables):
        parts.append(part)
        size += len(part)
        if size > MOST_TEXT:
            raise TooMuch(f"it produces more than {MOST_TEXT} characters")
    return "".join(parts)
