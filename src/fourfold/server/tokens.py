"""POST /v1/tokenize, /v1/detokenize (vLLM's shapes, and llama.cpp's `content`)."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fourfold.errors import InvalidRequestError
from fourfold.server.errors import JSON
from fourfold.server.front import Front
from fourfold.server.messages import render, template_of
from fourfold.server.unsupported import refuse_unsupported
from fourfold.server.wire import DetokenizeBody, TokenizeBody
from fourfold.text.tools import declared_tools

encode = msgspec.json.encode


async def tokenize(front: Front, request: Request) -> Response:
    body, extra = await front.body(request, TokenizeBody)
    front.reader.warn_unknown(refuse_unsupported(extra, chat=body.messages is not None), "/v1/tokenize")
    front.check_model(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of prompt, messages and content; got {', '.join(given) or 'none'}", "prompt"
        )
    if body.tools and body.messages is None:
        raise InvalidRequestError("tools go with messages; give messages, too", "tools")
    special = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    if body.messages is not None:
        template = template_of(front, body.chat_template)
        rendered = await render(
            front,
            body,
            template,
            add_special_tokens=bool(special),
            tools=[tool.shown for tool in declared_tools(body.tools, "tools").values()],
            variables=body.chat_template_kwargs,
        )
        ids = rendered.prompt.ids
    elif body.content is not None:
        ids = await front.encode(body.content, add_special_tokens=bool(special))
    else:
        ids = await front.encode(body.prompt or "", add_special_tokens=special is not False)
    answer: dict[str, Any] = {"tokens": ids}
    if body.content is None:
        answer = {"count": len(ids), "max_model_len": front.model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [front.tokenizer.token_text(token) for token in ids]
    elif body.with_pieces:
        answer["tokens"] = [
            {"id": token, "piece": _piece(front.tokenizer.token_bytes(token))} for token in ids
        ]
    return Response(encode(answer), media_type=JSON)


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a token that is not whole characters (as llama.cpp does)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(front: Front, request: Request) -> Response:
    body, extra = await front.body(request, DetokenizeBody)
    front.reader.warn_unknown(extra, "/v1/detokenize")
    front.check_model(body.model)
    ids = front.check_ids(body.tokens, "tokens")
    skip = bool(body.skip_special_tokens)
    text = await front.in_thread_if_long(
        len(ids), lambda: front.tokenizer.decode(ids, skip_special_tokens=skip)
    )
    # vLLM's clients read `prompt`, llama.cpp's `content`.
    return Response(encode({"prompt": text, "content": text}), media_type=JSON)
