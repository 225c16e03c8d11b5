"""What must hold of every Program, traced or rewritten."""

from __future__ import annotations

from fourfold.program.graph import reads, weight_shapes
from fourfold.program.ops import (
    Add,
    Attention,
    Embed,
    Gate,
    GatherRows,
    KVSpec,
    Linear,
    Logits,
    Norm,
    Op,
    Program,
    Rope,
    RopeSpec,
    Scale,
    Value,
)


def check(program: Program) -> None:
    """Raises ValueError naming the op when the Program is malformed.

    That is: a value read before it is written, or written twice; a view outside its value; widths or rows
    that do not fit; a weight that is unknown, unused or of another shape; a KV layer not written exactly
    once; an end that is not Logits.
    """
    written: dict[int, Value] = {}
    used: set[str] = set()
    kv: list[KVSpec] = []
    for index, op in enumerate(program.ops):
        try:
            _check_reads(op, written)
            _check_widths(op, program)
            if op.out.id in written:
                raise ValueError(f"value {op.out.id} is written a second time")
            used |= _check_weights(op, program)
        except ValueError as error:
            raise ValueError(f"op {index} ({type(op).__name__}): {error}") from None
        written[op.out.id] = op.out
        if isinstance(op, Attention):
            kv.append(KVSpec(op.layer, op.kv_heads, op.head_dim, op.window))
    if unused := set(program.weights) - used:
        raise ValueError(f"weights no op uses: {', '.join(sorted(unused))}")
    if sorted(kv, key=lambda s: s.layer) != sorted(program.kv, key=lambda s: s.layer):
        raise ValueError(f"attention writes the KV layers {kv}, the program declares {list(program.kv)}")
    if len({spec.layer for spec in kv}) != len(kv):
        raise ValueError("a KV layer is written by two attentions")
    if not program.ops or not isinstance(program.ops[-1], Logits):
        raise ValueError("the last op must be Logits")


def _check_reads(op: Op, written: dict[int, Value]) -> None:
    for view in reads(op):
        if written.get(view.value.id) != view.value:
            raise ValueError(f"reads {view.value}, which no earlier op writes")
        if view.start < 0 or view.width < 1 or view.start + view.width > view.value.width:
            raise ValueError(f"reads columns past the end: {view}")
    rows = {view.value.rows for view in reads(op)}
    expected = {"logit_rows" if isinstance(op, GatherRows | Logits) else op.out.rows}
    source = {"tokens"} if isinstance(op, GatherRows) else expected
    if op.out.rows not in expected or (rows and rows != source):
        raise ValueError(f"reads {sorted(rows)} and writes {op.out.rows}")


def _check_weights(op: Op, program: Program) -> set[str]:
    for name in op.weights if isinstance(op, Linear) else ():
        if name not in program.weights:  # before shapes are asked for
            raise ValueError(f"names an unknown weight {name}")
    shapes = weight_shapes(op, program)
    for name, shape in shapes.items():
        if name not in program.weights:
            raise ValueError(f"names an unknown weight {name}")
        if program.weights[name].shape != shape:
            raise ValueError(f"needs {name} as {shape}, the program has it as {program.weights[name].shape}")
    return set(shapes)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_rope(spec: RopeSpec, head_dim: int) -> None:
    _require(
        0 < spec.dim <= head_dim and spec.dim == 2 * len(spec.inv_freq),
        f"rotates {spec.dim} of {head_dim} columns with {len(spec.inv_freq)} frequencies",
    )


def _check_widths(op: Op, program: Program) -> None:
    match op:
        case Embed():
            _require(op.out.width == program.hidden_size, f"embeds to {op.out.width} columns")
        case Norm():
            _require(op.x.width == op.out.width, f"{op.x.width} columns in, {op.out.width} out")
            _require(op.x.width % op.heads == 0, f"{op.x.width} columns in {op.heads} heads")
            _require(op.residual is None or op.residual.width == op.out.width, "residual of another width")
        case Linear():
            _check_linear(op, program)
        case Rope():
            fits = op.x.width == op.out.width == op.heads * op.head_dim
            _require(fits, f"{op.x.width} columns in {op.heads} heads")
            _check_rope(op.spec, op.head_dim)
        case Attention():
            wide, narrow = op.heads * op.head_dim, op.kv_heads * op.head_dim
            _require(op.heads % op.kv_heads == 0, f"{op.heads} heads over {op.kv_heads} KV heads")
            widths = (op.q.width, op.out.width, op.k.width, op.v.width)
            _require(widths == (wide, wide, narrow, narrow), f"q, out, k, v of {widths} columns")
            _require(op.window is None or op.window > 0, f"a window of {op.window}")
            if op.rope is not None:
                _check_rope(op.rope, op.head_dim)
        case Gate():
            _require(op.gate.width == op.up.width == op.out.width, "gate, up and out differ in width")
        case Add():
            _require(op.a.width == op.b.width == op.out.width, "a, b and out differ in width")
        case Scale():
            _require(op.x.width == op.out.width, f"{op.x.width} columns in, {op.out.width} out")
        case GatherRows():
            _require(op.x.width == op.out.width, f"{op.x.width} columns in, {op.out.width} out")
        case Logits():
            _require(op.out.width == program.vocab_size, f"{op.out.width} logits of {program.vocab_size}")


def _check_linear(op: Linear, program: Program) -> None:
    _require(len(op.weights) == len(op.biases) >= 1, f"{len(op.weights)} weights, {len(op.biases)} biases")
    for name in op.weights:
        _require(name in program.weights, f"names an unknown weight {name}")
    rows = [program.weights[name].shape[0] for name in op.weights]
    if op.gate is None:
        _require(sum(rows) == op.out.width, f"matrices of {rows} rows give {op.out.width} columns")
    else:
        _require(rows == [op.out.width] * 2, f"a gated pair of {rows} rows gives {op.out.width} columns")
        _require(op.residual is None, "a gated pair takes no residual")
    _require(op.residual is None or op.residual.width == op.out.width, "residual of another width")
