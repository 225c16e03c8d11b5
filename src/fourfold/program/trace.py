"""The builder that model code is written with: one method per op, each giving a fresh value.

    t = Tracer("llama", vocab_size=49152, hidden_size=576, max_position=8192)
    h = t.embed("embed.weight")
    q = t.linear(t.norm(h, "layers.0.attn_norm.weight", eps=1e-5), "layers.0.q", 576)

A weight is registered by the op that names it, with the shape that op needs. Naming one twice is fine (tied
embeddings) as long as the shapes agree.
"""

from __future__ import annotations

from msgspec.structs import replace

from fourfold.program.check import check
from fourfold.program.graph import whole
from fourfold.program.ops import (
    Activation,
    Add,
    Attention,
    Embed,
    Gate,
    GatherRows,
    KVSpec,
    Linear,
    Logits,
    Norm,
    NormSpec,
    Op,
    Program,
    Rope,
    RopeSpec,
    Scale,
    Value,
    View,
    WeightSpec,
)


class Tracer:
    """Collects ops and weights; `finish` gives the checked Program. ValueError when shapes clash."""

    def __init__(self, family: str, *, vocab_size: int, hidden_size: int, max_position: int) -> None:
        self._family = family
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_position = max_position
        self._ops: list[Op] = []
        self._weights: dict[str, WeightSpec] = {}
        self._kv: list[KVSpec] = []
        self._notes: dict[str, str] = {}
        self._next_id = 0

    def note(self, key: str, text: str) -> None:
        """A decision the user may want to see; lands in Program.notes."""
        self._notes[key] = text

    def weight(self, name: str, *shape: int) -> str:
        known = self._weights.setdefault(name, WeightSpec(name, shape))
        if known.shape != shape:
            raise ValueError(f"weight {name} is {known.shape} to one op and {shape} to another")
        return name

    def embed(self, weight: str, scale: float = 1.0) -> Value:
        self.weight(weight, self._vocab_size, self._hidden_size)
        out = self._value(self._hidden_size)
        self._ops.append(Embed(out, weight, scale))
        return out

    def norm(self, x: Value, weight: str, eps: float, *, heads: int = 1) -> Value:
        """RMSNorm of a row, or of each of `heads` equal runs of its columns with one shared weight."""
        self.weight(weight, x.width // heads)
        out = replace(x, id=self._fresh())
        self._ops.append(Norm(whole(x), out, NormSpec(weight, eps), heads))
        return out

    def linear(self, x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        """x @ W^T (+ b) with the weights `name`.weight [width, x.width] and `name`.bias [width]."""
        weight = self.weight(f"{name}.weight", width, x.width)
        bias_name = self.weight(f"{name}.bias", width) if bias else None
        out = Value(self._fresh(), width, x.rows)
        self._ops.append(Linear(whole(x), out, (weight,), (bias_name,)))
        return out

    def rope(self, x: Value, heads: int, spec: RopeSpec) -> Value:
        out = replace(x, id=self._fresh())
        self._ops.append(Rope(whole(x), out, heads, x.width // heads, spec))
        return out

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        head_dim = q.width // heads
        self._kv.append(KVSpec(layer, kv_heads, head_dim, window))
        out = replace(q, id=self._fresh())
        self._ops.append(
            Attention(
                *(whole(q), whole(k), whole(v), out),
                layer=layer,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=scale,
                window=window,
                softcap=softcap,
            )
        )
        return out

    def gate(self, gate: Value, up: Value, act: Activation) -> Value:
        out = replace(up, id=self._fresh())
        self._ops.append(Gate(whole(gate), whole(up), out, act))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = replace(a, id=self._fresh())
        self._ops.append(Add(a, b, out))
        return out

    def scale(self, x: Value | View, factor: float) -> Value:
        view = whole(x) if isinstance(x, Value) else x
        out = Value(self._fresh(), view.width, view.value.rows)
        self._ops.append(Scale(view, out, factor))
        return out

    def gather_rows(self, x: Value) -> Value:
        out = Value(self._fresh(), x.width, "logit_rows")
        self._ops.append(GatherRows(x, out))
        return out

    def logits(self, x: Value, weight: str, *, softcap: float | None = None, scale: float = 1.0) -> Value:
        self.weight(weight, self._vocab_size, x.width)
        out = Value(self._fresh(), self._vocab_size, "logit_rows")
        self._ops.append(Logits(x, out, weight, softcap=softcap, scale=scale))
        return out

    def finish(self) -> Program:
        program = Program(
            family=self._family,
            ops=tuple(self._ops),
            weights=dict(self._weights),
            kv=tuple(self._kv),
            vocab_size=self._vocab_size,
            hidden_size=self._hidden_size,
            max_position=self._max_position,
            notes=dict(self._notes),
        )
        check(program)
        return program

    def _fresh(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _value(self, width: int) -> Value:
        return Value(self._fresh(), width)
