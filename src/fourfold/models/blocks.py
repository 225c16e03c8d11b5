"""Pieces of model code that several families share, as plain functions of a Tracer."""

from __future__ import annotations

from fourfold.models.geometry import Geometry
from fourfold.models.rope import Rope
from fourfold.program.ops import Activation, Value
from fourfold.program.trace import Tracer


def start(family: str, g: Geometry, rope: Rope) -> Tracer:
    """A Tracer with the notes every family has."""
    t = Tracer(family, vocab_size=g.vocab_size, hidden_size=g.hidden_size, max_position=rope.max_position)
    t.note("rope", rope.note)
    t.note("head", "tied to the embedding" if g.tied else "its own matrix")
    return t


def qkv(t: Tracer, x: Value, layer: str, g: Geometry, *, bias: bool = False) -> tuple[Value, Value, Value]:
    q = t.linear(x, f"{layer}.q", g.heads * g.head_dim, bias=bias)
    k = t.linear(x, f"{layer}.k", g.kv_heads * g.head_dim, bias=bias)
    v = t.linear(x, f"{layer}.v", g.kv_heads * g.head_dim, bias=bias)
    return q, k, v


def gated_mlp(t: Tracer, x: Value, layer: str, g: Geometry, act: Activation, *, bias: bool = False) -> Value:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, GLU variants)."""
    gate = t.linear(x, f"{layer}.gate", g.intermediate_size, bias=bias)
    up = t.linear(x, f"{layer}.up", g.intermediate_size, bias=bias)
    return t.linear(t.gate(gate, up, act), f"{layer}.down", g.hidden_size, bias=bias)


def head(t: Tracer, h: Value, g: Geometry, *, softcap: float | None = None) -> None:
    """Final norm and logits of the wanted rows. A tied head names the embedding's own weight: one copy."""
    rows = t.norm(t.gather_rows(h), "norm.weight", g.norm_eps)
    t.logits(rows, "embed.weight" if g.tied else "head.weight", softcap=softcap)
