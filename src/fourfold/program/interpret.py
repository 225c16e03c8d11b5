"""The readable oracle: any Program, fused or not, over whole sequences in fp32 NumPy. Slow on purpose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fourfold.program.ops import (
    Activation,
    Add,
    Attention,
    Embed,
    Gate,
    GatherRows,
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
)

Array = NDArray[np.float32]
Weights = Mapping[str, Array]


def interpret(
    program: Program, weights: Weights, tokens: Sequence[int], logit_rows: Sequence[int] | None = None
) -> Array:
    """Logits [len(logit_rows), vocab] fp32 of one sequence starting at position 0; all rows by default.

    weights: every Program weight by name, fp32, in its Program shape. KeyError when one is missing.
    """
    ids = np.asarray(tokens, np.int64)
    positions = np.arange(len(ids))
    wanted = positions if logit_rows is None else np.asarray(logit_rows, np.int64)
    values: dict[int, Array] = {}

    def read(item: View | Value) -> Array:
        if isinstance(item, Value):
            return values[item.id]
        return values[item.value.id][:, item.start : item.start + item.width]

    def run(op: Op) -> Array:
        match op:
            case Embed():
                return np.asarray(weights[op.weight][ids] * np.float32(op.scale), np.float32)
            case Norm():
                x = read(op.x)
                out = norm(x.reshape(len(x), op.heads, -1), op.spec, weights).reshape(x.shape)
                return out if op.residual is None else out + read(op.residual)
            case Linear():
                return linear(op, read(op.x), None if op.residual is None else read(op.residual), weights)
            case Rope():
                x = read(op.x)
                return rotate(x.reshape(len(x), op.heads, op.head_dim), positions, op.spec).reshape(x.shape)
            case Attention():
                return attention(op, read(op.q), read(op.k), read(op.v), weights, positions)
            case Gate():
                return activate(read(op.gate), op.act) * read(op.up)
            case Add():
                return read(op.a) + read(op.b)
            case Scale():
                return read(op.x) * np.float32(op.factor)
            case GatherRows():
                return read(op.x)[wanted]
            case Logits():
                return head(op, read(op.x), weights)

    for op in program.ops:
        values[op.out.id] = run(op)
    return values[program.ops[-1].out.id]


def norm(x: Array, spec: NormSpec, weights: Weights) -> Array:
    """Over the last axis."""
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdims=True, dtype=np.float32)
    mean_square = np.mean(x * x, -1, keepdims=True, dtype=np.float32)
    out = x / np.sqrt(mean_square + np.float32(spec.eps)) * (weights[spec.weight] + np.float32(spec.offset))
    return out if spec.bias is None else out + weights[spec.bias]


def linear(op: Linear, x: Array, residual: Array | None, weights: Weights) -> Array:
    if op.norm is not None:
        x = norm(x, op.norm, weights)
    parts: list[Array] = []
    for weight, bias in zip(op.weights, op.biases, strict=True):
        part = x @ weights[weight].T
        parts.append(part if bias is None else part + weights[bias])
    if op.gate is not None:
        return activate(parts[0], op.gate) * parts[1]
    out = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
    return out if residual is None else out + residual


def activate(x: Array, act: Activation) -> Array:
    match act:
        case "silu":
            return np.asarray(x / (1 + np.exp(-np.clip(x, -80, None))), np.float32)
        case "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
            return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float32)
        case "gelu":
            erf = np.vectorize(math.erf, otypes=[np.float32])
            return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))), np.float32)


def rotate(x: Array, positions: NDArray[np.int64], spec: RopeSpec) -> Array:
    """x: [T, heads, head_dim]; column i < dim/2 is paired with i + dim/2, columns past dim stay."""
    half = spec.dim // 2
    angles = positions.astype(np.float32)[:, None] * np.asarray(spec.inv_freq, np.float32)
    cos = (np.cos(angles) * np.float32(spec.scale))[:, None, :]
    sin = (np.sin(angles) * np.float32(spec.scale))[:, None, :]
    low, high = x[..., :half], x[..., half : spec.dim]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin, x[..., spec.dim :]), -1)


def attention(
    op: Attention, q: Array, k: Array, v: Array, weights: Weights, positions: NDArray[np.int64]
) -> Array:
    rows = len(q)
    queries = q.reshape(rows, op.heads, op.head_dim)
    keys = k.reshape(rows, op.kv_heads, op.head_dim)
    group = op.heads // op.kv_heads
    if op.q_norm is not None:
        queries = norm(queries, op.q_norm, weights)
    if op.k_norm is not None:
        keys = norm(keys, op.k_norm, weights)
    if op.rope is not None:
        queries, keys = rotate(queries, positions, op.rope), rotate(keys, positions, op.rope)
    keys = np.repeat(keys, group, 1)
    held = np.repeat(v.reshape(rows, op.kv_heads, op.head_dim), group, 1)

    scores = np.einsum("qhd,khd->hqk", queries, keys) * np.float32(op.scale)
    if op.softcap is not None:
        scores = np.tanh(scores / np.float32(op.softcap)) * np.float32(op.softcap)
    distance = positions[:, None] - positions[None, :]
    seen = (distance >= 0) & (distance < (op.window or rows))
    scores = np.where(seen[None], scores, np.float32(-np.inf))
    top = scores.max(-1, keepdims=True)
    sinks = None if op.sinks is None else weights[op.sinks].reshape(op.heads, 1, 1)
    if sinks is not None:
        top = np.maximum(top, sinks)
    shares = np.exp(scores - top)
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    out = np.einsum("hqk,khd->qhd", shares / total, held)
    return np.asarray(out.reshape(rows, op.heads * op.head_dim), np.float32)


def head(op: Logits, x: Array, weights: Weights) -> Array:
    if op.norm is not None:
        x = norm(x, op.norm, weights)
    out = x @ weights[op.weight].T
    if op.bias is not None:
        out = out + weights[op.bias]
    out = out * np.float32(op.scale)
    if op.softcap is not None:
        out = np.tanh(out / np.float32(op.softcap)) * np.float32(op.softcap)
    return np.asarray(out, np.float32)
