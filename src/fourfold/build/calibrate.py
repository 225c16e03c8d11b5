"""Which columns of each matmul's input are far larger than the rest, found by running the model once.

A group of int8 activations shares one scale, so one large number costs the others their precision. In trained
transformers the large ones sit in the same few columns for every token (Dettmers et al. 2022, LLM.int8();
Xiao et al. 2023, SmoothQuant). Those columns are kept out of the groups and multiplied in fp32: on
SmolLM2-135M twelve of 576 columns cut the divergence from fp32 to a third.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fourfold import _native
from fourfold.build.packed import ELEM, Outliers, PackedMatrix, PackedWeights
from fourfold.program.ops import Linear, Logits, Program

OUTLIERS = 12
"""Columns per input, at most a sixteenth of them; native/rows.h has the same bound."""

TOKENS = 128
"""Pseudo-random token ids the model is run on: the columns hardly depend on which."""


def calibration_tokens(vocab_size: int, max_position: int) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, vocab_size, min(TOKENS, max_position)).astype(np.int32)


def find_outliers(
    program: Program, weights: PackedWeights, magnitudes: Mapping[int, NDArray[np.float32]]
) -> dict[str, Outliers]:
    """First weight name of each op with integer matrices → its input's outliers.

    magnitudes: index of op → largest magnitude of each input column [k].
    """
    found: dict[str, Outliers] = {}
    for index, op in enumerate(program.ops):
        if not isinstance(op, Linear | Logits):
            continue
        names = op.weights if isinstance(op, Linear) else (op.weight,)
        matrices = [weights.matrices[name] for name in names]
        if any(m.elem != ELEM["ints"] for m in matrices):
            continue
        largest = magnitudes[index]
        count = min(OUTLIERS, len(largest) // 16)
        channels = np.sort(np.argsort(-largest, kind="stable")[:count]).astype(np.int32)
        found[names[0]] = Outliers(channels, tuple(_columns(m, channels) for m in matrices))
    return found


def _columns(m: PackedMatrix, channels: NDArray[np.int32]) -> NDArray[np.uint16]:
    out = np.empty(-(-m.n // 16) * len(channels) * 16, np.uint16)
    _native.extract_columns(m.data, m.n, m.k, m.bits, m.group, m.zero, m.has_offset, m.wide, channels, out)
    return out
