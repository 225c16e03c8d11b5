"""Tools for models whose chat template has no place for them: described in the system message, called in
Hermes' format. Earlier calls and results become text in turns that every template has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INSTRUCTIONS = """\
You may call one or more of these functions to help with the user's query. Their JSON Schemas:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as a JSON object within <tool_call> tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template that knows neither tools nor their results."""
    plain = [_plain(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = _INSTRUCTIONS.format(tools=listed)
        if plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": _joined(plain[0]["content"], text)}
        else:
            plain.insert(0, {"role": "system", "content": text})
    merged: list[dict[str, Any]] = []
    for message, given in zip(plain, [{}] * (len(plain) - len(messages)) + list(messages), strict=True):
        # Templates of some families refuse two turns of one side in a row; only results bring such turns.
        last = merged[-1] if merged else None
        if last is not None and last["role"] == message["role"] == "user" and last.get("_result"):
            last["content"] = _joined(last["content"], message["content"])
        else:
            merged.append({**message, "_result": given.get("role") in ("tool", "function")})
    return [{key: value for key, value in each.items() if key != "_result"} for each in merged]


def _plain(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] in ("tool", "function"):
        text = content if isinstance(content, str) else _text(content)
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": _joined(content, "\n".join(texts))}


def _call(function: Mapping[str, Any]) -> str:
    """Arguments stand as they were sent, if they are JSON text."""
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}'


def _joined(content: Any, text: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text


def _text(parts: Sequence[Any]) -> str:
    return "\n".join(part["text"] if isinstance(part, Mapping) else str(part) for part in parts)
