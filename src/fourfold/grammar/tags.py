"""Structural tags: text that is free until a trigger, then a tag whose content is constrained, and so on.

Both notations of vLLM and SGLang: {"structures": [{begin, schema, end}], "triggers": [...]}, and
XGrammar's {"format": {...}}, a tree of const_string, token, json_schema, regex, grammar, any_text, sequence,
or, tag, triggered_tags, tags_with_separator, optional, star and plus. They become one Lark grammar; free text
is a lazy lexeme, which ends as soon as the trigger (or the end of the tag around it) was written, so neither
can be a part of the free text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from fourfold.errors import InvalidRequestError
from fourfold.types import Constraint

MAX_TAGS = 2_000
"""Parts of one structural tag, the nested ones included."""
MAX_NESTING = 32

ContentKind = Literal["json", "regex", "lark"]
MakeContent = Callable[[ContentKind, str], Constraint]
"""A content's constraint from its kind and text (a schema as JSON)."""

_TEXT = "TEXT"
_CONTENT: dict[str, tuple[str, ContentKind]] = {
    "json_schema": ("json_schema", "json"),
    "regex": ("pattern", "regex"),
    "grammar": ("grammar", "lark"),
}
"""Of each type of content: its field and kind."""
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def structural_constraint(asked: Any, make: MakeContent) -> Constraint:
    """asked: either notation, as decoded JSON; of a json_schema content `"strict": false` allows a grammar
    that accepts more than the schema does. Raises InvalidRequestError naming the place, the value and what
    would be right."""
    if not isinstance(asked, dict):
        raise InvalidRequestError("a structural tag must be an object")
    writer = _Writer(make)
    if "format" in asked:
        start = writer.rule(asked["format"], "format", None)[0]
    elif "structures" in asked:
        tags = [
            {
                "begin": _field(one, "begin", f"structures[{i}]"),
                "content": {
                    "type": "json_schema",
                    "json_schema": _field(one, "schema", f"structures[{i}]"),
                },
                "end": _field(one, "end", f"structures[{i}]"),
            }
            for i, one in enumerate(_list(asked, "structures", "it"))
        ]
        listed = {"type": "triggered_tags", "tags": tags, "triggers": asked.get("triggers")}
        start = writer.rule(listed, "structures", None)[0]
    else:
        raise InvalidRequestError("a structural tag needs either format or structures and triggers")
    return writer.finish(start)


class _Writer:
    """Collects the rules of one Lark grammar and the grammars of the contents beside it."""

    def __init__(self, make: MakeContent) -> None:
        self._make = make
        self._rules: list[str] = []
        self._contents: list[dict[str, Any]] = []
        self._names: dict[tuple[str, str], str] = {}
        self._unsaid: list[str] = []
        self._count = 0
        self._depth = 0

    def finish(self, start: str) -> Constraint:
        lark = "\n".join([f"start: {start}", *self._rules, rf"{_TEXT}: /(.|\n)*/"])
        tags = {"name": "structural_tag", "lark_grammar": lark}
        return Constraint(
            grammar=json.dumps({"grammars": [tags, *self._contents]}), unsaid=tuple(self._unsaid)
        )

    def rule(self, node: Any, at: str, stop: str | None) -> tuple[str, bool]:
        """What `node` is in Lark, and whether that contains `stop`, the terminal that comes next, already:
        free text ends with it."""
        self._count += 1
        self._depth += 1
        if self._count > MAX_TAGS:
            raise InvalidRequestError(f"it has more than {MAX_TAGS} parts")
        if self._depth > MAX_NESTING:
            raise InvalidRequestError(f"it nests more than {MAX_NESTING} levels deep")
        kind = _field(node, "type", at)
        if kind in _CONTENT:
            ended = (self._content(node, kind, at), False)
        elif kind == "any_text":
            ended = (_TEXT, False) if stop is None else (self._until(stop), True)
        elif kind in ("const_string", "token"):
            ended = (self._const(node, at), False)
        elif kind == "sequence":
            ended = self._sequence(_list(node, "elements", at), f"{at}.elements", stop)
        elif kind == "or":
            ended = self._alternatives(_list(node, "elements", at), f"{at}.elements", stop)
        elif kind in _REPEATS:
            inner = self.rule(_field(node, "content", at), f"{at}.content", None)[0]
            ended = (f"({self._named(inner)}){_REPEATS[kind]}", False)
        elif kind == "tag":
            ended = (self._tag(node, at), False)
        elif kind == "triggered_tags":
            ended = self._triggered(node, at, stop)
        elif kind == "tags_with_separator":
            ended = (self._separated(node, at), False)
        else:
            known = (*_CONTENT, "any_text", "const_string", "token", "sequence", "or", *_REPEATS)
            raise InvalidRequestError(
                f"{at}.type is {str(kind)[:60]!r}; known are {', '.join(known)}, tag, triggered_tags and "
                "tags_with_separator"
            )
        self._depth -= 1
        return ended

    def _content(self, node: dict[str, Any], kind: str, at: str) -> str:
        name, source = _CONTENT[kind]
        value = _field(node, name, at)
        strict = node.get("strict", True)
        if source != "json" and not isinstance(value, str):
            raise InvalidRequestError(f"{at}.{name} must be a text, got {str(value)[:60]!r}")
        text = json.dumps(value) if source == "json" else value
        known = self._names.get((source, text))
        if known is not None:
            return known
        try:
            made = self._make(source, text)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{at}.{name}: {error}", error.param, error.code) from error
        if made.schema is not None and strict:
            raise InvalidRequestError(
                f"{at}.{name}: inside a structural tag only the grammar guarantees, and it cannot express "
                f"{', '.join(made.unsaid[:3])}; leave that out, or allow more with strict: false"
            )
        self._unsaid += made.unsaid
        rule = self._names[source, text] = f"@content{len(self._contents)}"
        grammar = {"lark_grammar": made.grammar}
        if source != "lark":
            (grammar,) = json.loads(made.grammar)["grammars"]
        self._contents.append({**grammar, "name": rule[1:]})
        return rule

    def _sequence(self, elements: list[Any], at: str, stop: str | None) -> tuple[str, bool]:
        parts: list[str] = []
        contained = False
        for i, element in enumerate(elements):
            last = i + 1 == len(elements)
            following = stop if last else self._first(elements[i + 1], f"{at}[{i + 1}]")
            if contained:
                # The free text before ends with this element's first terminal.
                element = _without_first(element)
            text, contained = self.rule(element, f"{at}[{i}]", following)
            if not last and not contained and _ends_open(element):
                raise InvalidRequestError(
                    f"{at}[{i}]: free text must end, so a const_string, a token or a tag must follow it"
                )
            parts.append(text)
        return " ".join(parts), contained

    def _alternatives(self, elements: list[Any], at: str, stop: str | None) -> tuple[str, bool]:
        texts = []
        for i, element in enumerate(elements):
            text, contained = self.rule(element, f"{at}[{i}]", stop)
            texts.append(self._named(text if contained or stop is None else f"{text} {stop}"))
        return "(" + " | ".join(texts) + ")", stop is not None

    def _tag(self, node: Any, at: str, begun: str = "") -> str:
        """begun: how much of `begin` was written already."""
        begin, end = _field(node, "begin", at), _field(node, "end", at)
        stop = self._end(end, f"{at}.end")
        inside, contained = self.rule(_field(node, "content", at), f"{at}.content", stop)
        first = _terminal(begin, f"{at}.begin", begun)
        return " ".join(filter(None, (first, inside, "" if contained else stop)))

    def _triggered(self, node: dict[str, Any], at: str, stop: str | None) -> tuple[str, bool]:
        tags = _list(node, "tags", at)
        triggers = _list(node, "triggers", at)
        by_trigger: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            place = f"{at}.tags[{i}]"
            begin = _field(tag, "begin", place)
            trigger = next((one for one in triggers if _starts(begin, one)), None)
            if trigger is None:
                raise InvalidRequestError(
                    f"{place}.begin {str(begin)[:60]!r} starts with none of the triggers"
                )
            rest = self._tag(tag, place, trigger) if isinstance(begin, str) else self._tag(tag, place, begin)
            by_trigger.setdefault(_terminal(trigger, f"{at}.triggers"), []).append(self._named(rest))
        once = [f"{self._until(trigger)} ({' | '.join(rests)})" for trigger, rests in by_trigger.items()]
        tag = self._named(" | ".join(once))
        if node.get("stop_after_first"):
            # Whatever follows the tag, only what follows this part may be written.
            plain = _TEXT if stop is None else self._until(stop)
            after = "" if stop is None else f" {stop}"
            return f"({tag}{after}{'' if node.get('at_least_one') else f' | {plain}'})", stop is not None
        many = f"{tag}{'+' if node.get('at_least_one') else '*'}"
        return (f"{many} {_TEXT}", False) if stop is None else (f"{many} {self._until(stop)}", True)

    def _separated(self, node: dict[str, Any], at: str) -> str:
        tags = _list(node, "tags", at)
        one = self._named(" | ".join(self._tag(tag, f"{at}.tags[{i}]") for i, tag in enumerate(tags)))
        separator = _terminal(_field(node, "separator", at), f"{at}.separator")
        more = "" if node.get("stop_after_first") else f" ({separator} {one})*"
        return f"({one}{more}){'' if node.get('at_least_one') else '?'}"

    def _until(self, stop: str) -> str:
        """Free text that ends with the first `stop`."""
        if stop.startswith("<["):
            return f"{_TEXT} {stop}"  # no text contains a special token
        known = self._names.get(("until", stop))
        if known is None:
            known = self._names["until", stop] = f"until_{len(self._names)}"
            self._rules.append(f"{known}[lazy]: {_TEXT} {stop}")
        return known

    def _named(self, text: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {text}")
        return name

    def _first(self, node: Any, at: str) -> str | None:
        """The terminal that `node` begins with, if it is always the same."""
        kind = _field(node, "type", at)
        if kind in ("const_string", "token"):
            return self._const(node, at)
        return _terminal(_field(node, "begin", at), f"{at}.begin") if kind == "tag" else None

    def _const(self, node: dict[str, Any], at: str) -> str:
        name = "token" if node["type"] == "token" else "value"
        return _terminal(node if name == "token" else _field(node, name, at), at)

    def _end(self, end: Any, at: str) -> str | None:
        if isinstance(end, list):
            if len(end) != 1:
                raise InvalidRequestError(f"{at} must be one text, got {len(end)}")
            end = end[0]
        return _terminal(end, at) or None


def _terminal(value: Any, at: str, begun: Any = "") -> str:
    """A text (without what was `begun` of it) or {"type": "token", "token": id} in Lark; "" for nothing."""
    if isinstance(value, str) and isinstance(begun, str):
        rest = value[len(begun) :]
        return json.dumps(rest, ensure_ascii=False) if rest else ""
    token = value.get("token") if isinstance(value, dict) else None
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
        raise InvalidRequestError(
            f'{at} must be a text or {{"type": "token", "token": id}}, got {str(value)[:60]!r}'
        )
    return "" if begun else f"<[{token}]>"


def _starts(begin: Any, trigger: Any) -> bool:
    if isinstance(begin, str) and isinstance(trigger, str):
        return bool(trigger) and begin.startswith(trigger)
    return bool(begin == trigger)


def _without_first(node: dict[str, Any]) -> dict[str, Any]:
    """A const_string or tag whose first terminal was written already."""
    if node["type"] == "tag":
        return {"type": "sequence", "elements": [{**node, "begin": ""}]}
    return {"type": "const_string", "value": ""}


def _ends_open(node: dict[str, Any]) -> bool:
    """Whether the last thing in `node` is free text."""
    kind = node.get("type")
    if kind in ("sequence", "or"):
        elements = node["elements"]
        return any(map(_ends_open, elements if kind == "or" else elements[-1:]))
    return kind in ("any_text", "triggered_tags")


def _field(node: Any, name: str, at: str) -> Any:
    if not isinstance(node, dict):
        raise InvalidRequestError(f"{at} must be an object, got {str(node)[:60]!r}")
    if name not in node:
        raise InvalidRequestError(f"{at}.{name} is required")
    return node[name]


def _list(node: Any, name: str, at: str) -> list[Any]:
    value = _field(node, name, at)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{at}.{name} must be a list of at least one, got {str(value)[:60]!r}")
    return value
