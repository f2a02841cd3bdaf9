"""Jinja for templates that come with adapters, and are therefore not trusted.

Goes in: template source.  Comes out: a compiled template that, run inside `budget.limited`, ends
within a deadline and a size, whatever it is.  Jinja's immutable sandbox keeps a template from
reaching Python objects; what is added here keeps it from eating time and memory:

- every loop iteration and every call looks at the clock and at a budget of produced characters;
- a value is weighed when it is made (string characters, plus one for each list or dict entry,
  counted as often as it would print), and refused above `budget.MAX_VALUE`: neither doubling
  strings nor lists that hold themselves twice can grow;
- what can make much out of little in one call (`*`, `**`, `%`, format, replace, join, indent,
  tojson) is measured before it is run; filters, methods and globals outside a list do not exist;
- constants are not folded at compile time, so that all of this happens while the clock runs.

What remains: one built-in operation on values of at most MAX_VALUE characters runs to its end,
tens of milliseconds past the deadline, and a template may hold a few hundred MiB for that long.
"""

import html
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from lorad.text.budget import (
    MAX_ITEMS,
    MAX_RANGE,
    Exceeded,
    current,
    need_format,
    need_parts,
    need_power,
    need_product,
    need_replace,
    need_room,
)

#: Characters of a template's source; the largest in common use has about 20,000.
MAX_SOURCE = 128 * 1024

_SAFE_FILTERS = (
    "abs capitalize count d default dictsort first float groupby int items last length lower map"
    " max min reject rejectattr reverse select selectattr sort string title trim truncate unique"
    " upper urlencode wordcount"
)
_STR_METHODS = (
    "capitalize casefold count endswith find format format_map index isalnum isalpha isascii"
    " isdecimal isdigit islower isnumeric isprintable isspace istitle isupper join lower lstrip"
    " partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split"
    " splitlines startswith strip swapcase title upper"
)
#: Methods of built-in values that a template may call; all others are refused by name.
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
}
#: Jinja's own helpers, whose methods are Jinja's code.
_HELPERS = (LoopContext, BlockReference, TemplateReference, Joiner, Context)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """`compile_template` instead of `from_string`; templates run inside `limited` only."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[loopcontrols, _Generation],
        )
        self.filters = {
            name: _measured(FILTERS[name]) for name in _SAFE_FILTERS.split()
        } | _OWN_FILTERS
        tests: Mapping[str, Any] = TESTS
        self.tests = {name: _ticking(test) for name, test in tests.items()}
        self._source_size = 0  # of the largest template
        for name in ("lipsum", "cycler"):
            del self.globals[name]
        self.globals |= {"range": _range, "dict": _dict, "namespace": _Namespace, **functions}

    def compile_template(self, source: str) -> jinja2.Template:
        """jinja2.TemplateSyntaxError, Exceeded or RecursionError when it cannot be compiled."""
        if len(source) > MAX_SOURCE:
            raise Exceeded(f"it has {len(source)} characters, allowed are {MAX_SOURCE}")
        self._source_size = max(self._source_size, len(source))
        tree = _Instrument(self).visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def asked_of(self, source: str) -> frozenset[str]:
        """Variables that a template which could be compiled wants from outside."""
        return frozenset(find_undeclared_variables(self.parse(source)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            need_product(left, right)
        elif operator == "**":
            need_power(left, right)
        elif operator == "%" and isinstance(left, str):
            need_format(left, right)
        return current().take(super().call_binop(context, operator, left, right))

    def call(
        __self,  # keyword arguments of the template may be called self
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        budget = current()
        budget.tick()
        if isinstance(__obj, LoopContext) and args:
            args = (_each(args[0], __self._source_size), *args[1:])  # {% for ... recursive %}
        else:
            args = _check_method(__obj, args, kwargs)
        return budget.take(super().call(__context, __obj, *args, **kwargs))


class _Instrument(NodeTransformer):
    """Puts loops, literals and `~` behind filters, which a template cannot rename or shadow."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = self._through("-each", node.iter, nodes.Const(literal))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("-concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = self._through("-take", node.filter)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if constant else self._through("-take", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if constant or node.ctx != "load" else self._through("-take", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._through("-take", node)

    def _through(self, name: str, node: nodes.Node | None, *args: nodes.Expr) -> nodes.Filter:
        wrapped = nodes.Filter(node, name, list(args), [], None, None)
        wrapped.set_environment(self._environment)
        wrapped.set_lineno(node.lineno if node is not None else 1)
        return wrapped


class _Generation(Extension):
    """`{% generation %}` marks what a trainer masks; to a server it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Prints as a word, so that namespaces that hold each other print in no time."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that self= is an attribute
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise Exceeded(f"it stores a private attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


# ----------------------------------------------------------------- filters and functions
@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Every `{{ }}` passes here, inside macros and `{% set %}` blocks too.  Taking the context
    keeps Jinja from running it at compile time."""
    return value if isinstance(value, Undefined) else current().take(value)


def _each(items: Any, literal: int) -> Iterator[Any]:
    """Items of a loop; an iteration costs at least the text that stands in the loop's body."""
    budget = current()
    for item in items:
        budget.tick(1 + max(0, literal))
        yield item


def _concat(parts: list[Any]) -> str:
    budget = current()
    need_room(sum(budget.weigh(part) for part in parts))
    return str(budget.take("".join(map(str, parts))))


def _take(value: Any) -> Any:
    return current().take(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, with the arguments that chat templates use."""
    budget = current()
    depth = _width(indent) if indent is not None else 0
    need_room(budget.weigh(value) * (1 + depth))
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return str(budget.take(text))


def _list(value: Any) -> list[Any]:
    return list(current().take(list(islice(value, MAX_ITEMS + 1))))


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = FILTERS["map"](context, value, attribute=attribute)
    return str(_take(str(d).join(need_parts(str(d), value))))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    budget = current()
    need_room(budget.weigh(text))
    text, old, new = str(text), str(old), str(new)
    need_replace(text, old, new)
    return str(budget.take(text.replace(old, new, -1 if count is None else count)))


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(text)
    need_room(len(text) + (text.count("\n") + 1) * _width(width))
    return str(_take(FILTERS["indent"](text, width, first, blank)))


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    need_format(str(text), *args, *kwargs.values())
    return str(_take(str(text) % (kwargs or args)))


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(int(precision)) > 20:
        raise Exceeded("it rounds to more than 20 digits")
    return FILTERS["round"](value, int(precision), method)


def _sum(values: Any, start: float = 0) -> Any:
    total = start
    for value in values:
        if not isinstance(value, (int, float)):
            raise Exceeded("it sums something other than numbers")
        total = _take(total + value)
    return total


def _plain(value: Any) -> str:
    """`safe` has nothing to say where nothing is escaped."""
    return str(_take(value))


def _escape(value: Any) -> str:
    return str(_take(html.escape(_plain(value))))


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise Exceeded(f"it asks for a range of more than {MAX_RANGE} numbers")
    return numbers


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function rather than the class, which would bring its methods."""
    return dict(*args, **kwargs)


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is accounted for; Jinja's marks (pass_context) are kept."""

    def filter_(*args: Any, **kwargs: Any) -> Any:
        return current().take(function(*args, **kwargs))

    filter_.__dict__.update(getattr(function, "__dict__", {}))  # abs has none
    return filter_


def _ticking(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that costs time when it is mapped over a long list."""

    def test(*args: Any, **kwargs: Any) -> Any:
        current().tick()
        return function(*args, **kwargs)

    test.__dict__.update(getattr(function, "__dict__", {}))  # operator.eq has none
    return test


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "-each": _each,
    "-concat": _concat,
    "-take": _take,
    "tojson": _tojson,
    "list": _list,
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "format": _format,
    "round": _round,
    "sum": _sum,
    "safe": _plain,
    "e": _escape,
    "escape": _escape,
}


# ----------------------------------------------------------------- methods and widths
def _width(value: int | str) -> int:
    width = len(value) if isinstance(value, str) else int(value)
    if width > 64:
        raise Exceeded("it indents by more than 64 characters")
    return width


def _check_method(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Refuse methods that are not listed, and measure those that can make much out of little."""
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, _HELPERS):
        return args
    name = getattr(function, "__name__", "")
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in _METHODS[kind]:
        raise Exceeded(f"it calls {type(owner).__name__}.{name}, which templates may not")
    if name == "join" and args:
        return (need_parts(owner, args[0]),)
    if name == "replace" and len(args) >= 2:
        need_replace(owner, str(args[0]), str(args[1]))
    if name in ("format", "format_map"):
        need_format(owner, *args, *kwargs.values())
    return args
