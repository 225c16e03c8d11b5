"""Hand-made programs for the tests of this folder."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fourfold.program.ops import Program, RopeSpec, Value
from fourfold.program.trace import Tracer

ROPE = RopeSpec(4, (1.0, 0.1))


def decoder(
    layers: int = 2, *, qk_norm: bool = False, post_norm: bool = False, unit_scale: bool = False
) -> Program:
    """A decoder of hidden size 12, heads 3 over 1 of size 4, MLP 20, vocabulary 17."""
    t = Tracer("test", vocab_size=17, hidden_size=12, max_position=64)
    h = t.embed("embed.weight", scale=2.0)
    if unit_scale:
        h = t.scale(h, 1.0)
    for i in range(layers):
        name = f"layers.{i}"
        x = t.norm(h, f"{name}.attn_norm.weight", 1e-5)
        q, k, v = (
            t.linear(x, f"{name}.q", 12, bias=True),
            t.linear(x, f"{name}.k", 4),
            t.linear(x, f"{name}.v", 4),
        )
        if qk_norm:
            q = t.norm(q, f"{name}.q_norm.weight", 1e-5, heads=3)
            k = t.norm(k, f"{name}.k_norm.weight", 1e-5, heads=1)
        x = t.attention(
            *(t.rope(q, 3, ROPE), t.rope(k, 1, ROPE), v), layer=i, heads=3, kv_heads=1, scale=0.5, window=5
        )
        x = t.linear(x, f"{name}.o", 12)
        h = t.add(h, t.norm(x, f"{name}.post.weight", 1e-5) if post_norm else x)
        x = t.norm(h, f"{name}.mlp_norm.weight", 1e-5)
        x = t.gate(t.linear(x, f"{name}.gate", 20), t.linear(x, f"{name}.up", 20, bias=True), "silu")
        h = t.add(h, t.linear(x, f"{name}.down", 12))
    t.logits(t.norm(t.gather_rows(h), "norm.weight", 1e-5), "embed.weight", softcap=10.0)
    return t.finish()


def random_weights(program: Program, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.4, spec.shape).astype(np.float32) for name, spec in program.weights.items()}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any graph of elementwise ops, norms and matmuls over values of a few widths, ending in logits."""
    t = Tracer("random", vocab_size=7, hidden_size=8, max_position=16)
    values: list[Value] = [t.embed("embed.weight")]
    for step in range(draw(st.integers(1, 24))):
        x = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["add", "norm", "linear", "gate", "scale"]))
        peers = [value for value in values if value.width == x.width]
        if kind == "add":
            made = t.add(x, draw(st.sampled_from(peers)))
        elif kind == "gate":
            made = t.gate(x, draw(st.sampled_from(peers)), "gelu_tanh")
        elif kind == "norm":
            made = t.norm(x, f"norm.{step}", 1e-5)
        elif kind == "scale":
            made = t.scale(x, draw(st.sampled_from([1.0, 0.5])))
        else:
            made = t.linear(x, f"linear.{step}", draw(st.sampled_from([4, 8, 24])))
        values.append(made)
    last = draw(st.sampled_from([value for value in values if value.width == 8]))
    rows = t.gather_rows(last)
    if draw(st.booleans()):
        rows = t.norm(rows, "norm.weight", 1e-5)
    t.logits(rows, "embed.weight")
    return t.finish()
