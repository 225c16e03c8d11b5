"""What a server serves."""

from __future__ import annotations

import msgspec

from fourfold.bench.load.http import Server, request
from fourfold.errors import FourfoldError


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def served_models(server: Server) -> list[str]:
    """Names from GET /v1/models, at least one. Raises FourfoldError if it does not answer with any."""
    body = bytearray()
    where = f"http{'s' * server.tls}://{server.host}:{server.port}{server.path}/v1/models"
    try:
        status = await request(server, "GET", "/v1/models", None, body.extend)
        names = [model.id for model in msgspec.json.decode(body, type=_Models).data] if status == 200 else []
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise FourfoldError(f"{where}: {error or type(error).__name__}; is the server running?") from error
    if not names:
        raise FourfoldError(f"{where}: status {status}, no models; name one with --model")
    return names
