"""Rewrites of a Program that keep its meaning. Each pass is one file; `optimize` runs them in order."""

from __future__ import annotations

from fourfold.program.check import check
from fourfold.program.ops import Program
from fourfold.program.passes.attention_prologue import fuse_attention_prologue
from fourfold.program.passes.gate_up import fuse_gate_up
from fourfold.program.passes.gather import gather_early
from fourfold.program.passes.identities import drop_identities
from fourfold.program.passes.norm import fuse_norm
from fourfold.program.passes.qkv import fuse_qkv
from fourfold.program.passes.residual import fuse_residual

PASSES = (
    drop_identities,
    fuse_attention_prologue,
    fuse_qkv,
    fuse_gate_up,
    fuse_norm,
    fuse_residual,
    gather_early,
)


def optimize(program: Program) -> Program:
    """Everything fused that the op set can express; checked."""
    for rewrite in PASSES:
        program = rewrite(program)
    check(program)
    return program


__all__ = [
    "PASSES",
    "drop_identities",
    "fuse_attention_prologue",
    "fuse_gate_up",
    "fuse_norm",
    "fuse_qkv",
    "fuse_residual",
    "gather_early",
    "optimize",
]
