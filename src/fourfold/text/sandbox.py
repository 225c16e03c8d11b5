"""Jinja2 for templates nobody has read: a sandbox that also bounds time and memory.

Jinja's sandbox keeps a template away from Python's internals, but not from looping for hours or building
strings of gigabytes. Here every loop iteration, call and operator is charged to a budget, and everything a
template can make larger (strings, lists and what is nested in them) is measured before or as it is made.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

MAX_STEPS = 1_000_000
"""Most loop iterations, calls and operators of one rendering."""
MAX_SIZE = 16_000_000
"""Longest text of one rendering, and largest value: its characters, and ELEMENT_SIZE for each element."""
ELEMENT_SIZE = 16
MAX_SECONDS = 2.0
"""Processor time of one rendering."""
MAX_INTEGER_BITS = 4096
MAX_INDENT = 64

_WIDTH = re.compile(r"\d{4,}|\*|\{[^{}]*\{")
"""Field widths of format strings: more than three digits, or given by an argument."""


class TemplateBudgetError(Exception):
    """A template asked for more work than a chat can need."""


class _Budget:
    """What one rendering may still use."""

    __slots__ = ("_deadline", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateBudgetError(f"took more than {MAX_STEPS} steps")
        if time.thread_time() > self._deadline:
            raise TemplateBudgetError(f"took more than {MAX_SECONDS:g} seconds of processor time")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateBudgetError(f"made something larger than {MAX_SIZE} characters")


def _measured(value: Any) -> Any:
    """The value itself, if it and all that is nested in it, however often, is not too large."""
    stack = [value]
    size = 0
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            size += ELEMENT_SIZE * len(each)
            stack.extend(each)
            stack.extend(each.values())
        elif isinstance(each, (list, tuple)):
            size += ELEMENT_SIZE * len(each)
            stack.extend(each)
        _check_size(size)
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_measured(value))


def _check_format(template: str) -> None:
    if _WIDTH.search(template):
        raise TemplateBudgetError(f"formats with a width that is too large or not fixed: {template[:40]!r}")


def _check_replace(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls and operators charged. Values are immutable, private attributes hidden."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget.get().step()
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            )
            if bits > MAX_INTEGER_BITS:
                raise TemplateBudgetError(f"made a number of more than {MAX_INTEGER_BITS} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(value) * times)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _measured(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self._check_method(owner, obj.__name__, args)
        return _measured(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _check_method(self, text: str, name: str, args: tuple[Any, ...]) -> None:
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and args:
            _check_size(len(text) * int(args[0]) if name == "expandtabs" else int(args[0]))
        elif name == "replace" and len(args) >= 2:
            _check_replace(text, str(args[0]), str(args[1]))
        elif name == "join" and args:
            _check_size(sum(len(str(each)) + len(text) for each in _measured(list(args[0]))))
        elif name == "translate":
            raise TemplateBudgetError("calls str.translate, which has no bound; use replace")


class _Generation(Extension):
    """The block {% generation %} of Hugging Face templates, which marks what the assistant said."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Charger:
    """Rewrites a template's loops, concatenations and literals to go through the budget."""

    def rewrite(self, node: nodes.Node) -> None:
        for name, value in node.iter_fields():
            if isinstance(value, list):
                setattr(node, name, [self._rewritten(each) for each in value])
            else:
                setattr(node, name, self._rewritten(value))
        if isinstance(node, nodes.For):
            node.iter = self._filtered(node.iter, "fourfold_counted")

    def _rewritten(self, value: Any) -> Any:
        if not isinstance(value, nodes.Node):
            return value
        self.rewrite(value)
        if isinstance(value, nodes.Concat):
            return self._filtered(self._like(nodes.List(value.nodes), value), "fourfold_concat")
        if isinstance(value, nodes.List):
            return value if self._constant(value.items) else self._filtered(value, "fourfold_measured")
        if isinstance(value, nodes.Dict):
            return self._filtered(value, "fourfold_measured")
        if isinstance(value, nodes.Tuple) and value.ctx == "load" and not self._constant(value.items):
            return self._filtered(value, "fourfold_measured")
        return value

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Node:
        return self._like(nodes.Filter(node, name, [], [], None, None), node)

    @staticmethod
    def _constant(items: list[nodes.Expr]) -> bool:
        return all(isinstance(item, nodes.Const) for item in items)

    @staticmethod
    def _like(made: nodes.Node, model: nodes.Node) -> nodes.Node:
        made.lineno = model.lineno
        made.environment = model.environment
        return made


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    step = _budget.get().step
    for each in iterable:
        step()
        yield each


def _concat(parts: list[Any]) -> str:
    texts = [_text(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face templates expect it: nothing escaped for HTML."""
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise TemplateBudgetError(f"indents by {indent}; at most {MAX_INDENT} are allowed")
    return json.dumps(
        _measured(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """As Jinja's filter of that name, with a bounded width."""
    prefix = width if isinstance(width, str) else " " * width
    if len(prefix) > MAX_INDENT:
        raise TemplateBudgetError(f"indents by {len(prefix)}; at most {MAX_INDENT} are allowed")
    lines = text.split("\n")
    _check_size(len(text) + len(prefix) * len(lines))
    return "\n".join(
        prefix + line if (first or at > 0) and (blank or line) else line for at, line in enumerate(lines)
    )


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = _text(text)
    _check_replace(text, old, new)
    replaced: str = text.replace(old, new, count)
    return replaced


def _format(template: str, *args: Any, **kwargs: Any) -> str:
    _check_format(template)
    text: str = template % _measured(kwargs or args)
    return text


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    parts = _measured(list(value))
    _check_size(len(parts) * len(d))
    text: str = do_join(context, parts, d, attribute)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_size(len(format) * 100)
    return datetime.now().strftime(format)


def _environment() -> Environment:
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        cache_size=0,
        finalize=_text,
    )
    # Of no use in a prompt, and without a bound of their own.
    for name in ("batch", "center", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr"):
        del environment.filters[name]
    environment.filters.update(
        format=_format,
        indent=_indent,
        join=_join,
        replace=_replace,
        string=_text,
        tojson=_tojson,
        fourfold_concat=_concat,
        fourfold_counted=_counted,
        fourfold_measured=_measured,
    )
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    del environment.globals["lipsum"]
    return environment


class Sandbox:
    """One compiled template. Threads may share it."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        tree = environment.parse(source)
        _Charger().rewrite(tree)
        self._template = environment.from_string(tree)

    def render(self, variables: dict[str, Any]) -> str:
        """Raises TemplateBudgetError, jinja2.TemplateError, or whatever the template's expressions raise."""
        token = _budget.set(_Budget())
        try:
            pieces: list[str] = []
            size = 0
            for piece in self._template.generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _budget.reset(token)
