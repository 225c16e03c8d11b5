"""The op set: a model is a flat list of these over a symbolic number of tokens T.

A `Value` is a [T, width] fp32 activation in the semantics of the Program. What a backend holds it in (int8
groups, bf16) is its own business, within the error bound of the activation dtype it was asked for.
A `View` is a run of columns of a value. Every op writes exactly one fresh value (SSA), so passes can
rewrite by substitution and the memory plan can reuse slots by liveness.

Weights are named; a Program never holds their data. It is kept in files as MessagePack. Shapes are row-major,
linears are [out, in].
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]


class Value(msgspec.Struct, frozen=True, array_like=True):
    """An activation of `width` columns. `rows` is "tokens" or, after GatherRows, "logit_rows"."""

    id: int
    width: int
    rows: Literal["tokens", "logit_rows"] = "tokens"


class View(msgspec.Struct, frozen=True, array_like=True):
    """Columns [start, start + width) of a value."""

    value: Value
    start: int
    width: int


class NormSpec(msgspec.Struct, frozen=True, array_like=True):
    """y = x / rms(x) * (weight + offset) (RMSNorm, Zhang & Sennrich 2019), or LayerNorm when kind="layer"."""

    weight: str
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: str | None = None


class RopeSpec(msgspec.Struct, frozen=True, array_like=True):
    """Rotary embedding (Su et al. 2021) of the first `dim` columns of each head.

    inv_freq: dim/2 angular frequencies (radians per position), already scaled by the variant (linear, NTK,
    yarn, llama3, longrope).  scale: factor on cos and sin (yarn's and longrope's attention factor).
    The pair of column i is i + dim/2 ("halves", as in Hugging Face); checkpoints that store interleaved pairs
    have their rows reordered at load.
    """

    dim: int
    inv_freq: tuple[float, ...]
    scale: float = 1.0


class Embed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    out: Value
    weight: str
    scale: float = 1.0


class Norm(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """out = norm(x) [+ residual]. `heads` > 1 normalises each of `heads` equal runs of columns by itself."""

    x: View
    out: Value
    spec: NormSpec
    heads: int = 1
    residual: Value | None = None


class Linear(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """out = concat_i(norm(x) @ W_i^T + b_i) [+ residual].

    weights: one or more matrices whose outputs are concatenated (fused QKV).
    norm: applied to x first (fused norm + quantize).
    gate: with exactly two matrices (gate, up): out = act(x @ gate^T) * (x @ up^T), width of one of them.
    """

    x: View
    out: Value
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    norm: NormSpec | None = None
    residual: Value | None = None
    gate: Activation | None = None


class Rope(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """out = x with each of `heads` heads of `head_dim` columns rotated by its token's position."""

    x: View
    out: Value
    heads: int
    head_dim: int
    spec: RopeSpec


class Attention(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Causal attention of this step's queries over the paged KV of `layer`, after writing k and v to it.

    q: [T, heads*head_dim], k, v: [T, kv_heads*head_dim]; query head h reads KV head h // (heads/kv_heads).
    scale: on q·k.  window: a query sees itself and the window-1 tokens before it (None: all).
    softcap: s -> softcap * tanh(s / softcap).
    sinks: weight of [heads] extra logits in the softmax denominator.
    q_norm, k_norm, rope: fused prologue, applied per head in this order, before scores and cache write.
    """

    q: View
    k: View
    v: View
    out: Value
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    rope: RopeSpec | None = None


class Gate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """out = act(gate) * up."""

    gate: View
    up: View
    out: Value
    act: Activation


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    a: Value
    b: Value
    out: Value


class Scale(msgspec.Struct, frozen=True, array_like=True, tag=True):
    x: View
    out: Value
    factor: float


class GatherRows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """out = the rows of x whose logits are wanted in this step."""

    x: Value
    out: Value


class Logits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """out = softcap(norm(x) @ W^T * scale): [logit_rows, vocab]."""

    x: Value
    out: Value
    weight: str
    norm: NormSpec | None = None
    softcap: float | None = None
    scale: float = 1.0
    bias: str | None = None


Op: TypeAlias = Embed | Norm | Linear | Rope | Attention | Gate | Add | Scale | GatherRows | Logits


class WeightSpec(msgspec.Struct, frozen=True, array_like=True):
    """A weight the Program names: its logical shape, [out, in] for matrices."""

    name: str
    shape: tuple[int, ...]


class KVSpec(msgspec.Struct, frozen=True, array_like=True):
    """What one attention layer keeps per token: kv_heads * head_dim for K and as much for V."""

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None = None


class Program(msgspec.Struct, frozen=True, array_like=True):
    """ops in execution order; the last one is Logits."""

    family: str
    ops: tuple[Op, ...]
    weights: dict[str, WeightSpec]
    kv: tuple[KVSpec, ...]
    vocab_size: int
    hidden_size: int
    max_position: int
    """Longest context the model was trained or scaled for, in tokens."""
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    """What was decided at trace time and a user may want to see (rope variant, tied head...)."""
