"""The C++ runtime (native/bindings*.cpp). Arrays are C-contiguous; wrong shapes and ranges raise ValueError.

The `test_*` functions run single kernels on a chosen instruction set (0 scalar, 1 AVX2, 2 AVX-512) for the
tests under tests/kernels; nothing else calls them.
"""

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_F32: TypeAlias = NDArray[np.float32]
_I32: TypeAlias = NDArray[np.int32]
_U16: TypeAlias = NDArray[np.uint16]
_U8: TypeAlias = NDArray[np.uint8]
_U32: TypeAlias = NDArray[np.uint32]
_View: TypeAlias = tuple[int, int, int]
"""Slot, first column, width."""
_Norm: TypeAlias = tuple[int, int, float, float, bool]
"""Vector of weights, vector of biases (-1: none), eps, offset, LayerNorm instead of RMSNorm."""

BLOCK_TOKENS: int
ACTIVATION_GROUP: int
"""Columns of an activation row that share one int8 scale."""
MAX_OUTLIERS: int
"""Columns of an op's input that can be kept out of its int8 groups."""

TEST_ISAS: tuple[str, ...]
"""Every instruction set by the number that the functions named test_... take."""

def isas() -> list[str]:
    """Instruction sets of this build that this CPU has, worst first."""

def spread_memory(nodes: list[int]) -> int:
    """Interleaves memory that this thread and those it starts touch first; [] ends it. 0 or an errno."""

def memory_policy_is_set() -> bool:
    """Whether this thread has a NUMA policy other than the default."""

def kv_block_bytes(kv_type: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one layer's KV block (native/attention.h: KvLayer)."""

def packed_bytes(
    n: int,
    k: int,
    elem: int,
    bits: int = 0,
    group: int = 0,
    zero: int = 0,
    has_offset: bool = False,
    wide: bool = False,
) -> int:
    """Bytes of a packed matrix [n, k] (native/matrix.h)."""

def pack_ints(
    q: _U8, scale: _F32, offset: _F32 | None, bits: int, group: int, zero: int, wide: bool, out: _U8
) -> None:
    """q [n, k], scale and offset [n, k / group] -> out [packed_bytes]."""

def pack_dense(rows: _U8, k: int, elem: int, out: _U8) -> None:
    """rows: the bytes of [n, k] elements -> out [packed_bytes]."""

def pack_fp8(codes: _U8, scale: _F32, group: int, elem: int, out: _U8) -> None:
    """codes [n, k], scale [n, ceil(k / group)] -> out [packed_bytes]."""

def extract_columns(
    packed: _U8,
    n: int,
    k: int,
    bits: int,
    group: int,
    zero: int,
    has_offset: bool,
    wide: bool,
    columns: _I32,
    out: _U16,
) -> None:
    """Columns of a packed integer matrix -> out, fp16 bits [tiles * columns * 16]."""

class Program:
    def __init__(self) -> None: ...
    def add_matrix(
        self,
        data: _U8,
        n: int,
        k: int,
        elem: int,
        bits: int = 0,
        group: int = 0,
        zero: int = 0,
        has_offset: bool = False,
        wide: bool = False,
    ) -> int: ...
    def add_vector(self, values: _F32) -> int: ...
    def add_rope(self, inv_freq: _F32, scale: float) -> int: ...
    def add_layer(self, kv_heads: int, head_dim: int) -> int: ...
    def add_slot(self, width: int, logit_rows: bool) -> None: ...
    def set_divisions(self, divisions: Sequence[tuple[int, int, int, bool, int, int]]) -> None:
        """Of the last op: (least, most, stream_rows, runs, block, chunk) by ascending rows."""

    def set_outliers(self, channels: Sequence[int], columns: Sequence[_U16]) -> None:
        """Of the op added last: columns of its input, and those columns of each of its matrices."""

    def add_op(
        self,
        kind: int,
        x: _View = ...,
        y: _View = ...,
        z: _View = ...,
        *,
        out: _View,
        residual: int = -1,
        segments: Sequence[tuple[int, int]] = ...,
        norm: _Norm = ...,
        k_norm: _Norm = ...,
        act: int = 0,
        scale: float = 1.0,
        softcap: float = 0.0,
        heads: int = 1,
        kv_heads: int = 1,
        head_dim: int = 0,
        window: int = 0,
        layer: int = 0,
        sinks: int = -1,
        rope: int = -1,
    ) -> None: ...

class Runtime:
    def __init__(
        self,
        program: Program,
        vocab: int,
        hidden: int,
        integers: int,
        kv_type: int,
        threads: int,
        max_tokens: int,
        max_seqs: int,
        max_context: int,
        num_blocks: int,
        isa: str,
    ) -> None: ...
    def step(
        self,
        tokens: _I32,
        seq_tokens: _I32,
        seq_context: _I32,
        block_start: _I32,
        blocks: _I32,
        samples: _U8,
        history: _I32,
        bias_ids: _I32,
        bias_values: _F32,
        ban_ids: _I32,
        masks: _U32 | None,
        token: _I32,
        logprob: _F32,
        rank: _I32,
        top_ids: _I32,
        top_logprobs: _F32,
        status: _U8,
        logits: _F32 | None,
        masks_ready: _U8 | None = None,
    ) -> None: ...
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...
    def read_block(self, block: int, out: _U8) -> None: ...
    def write_block(self, block: int, data: _U8) -> None: ...
    def start_observing(self) -> None:
        """From now on, steps note the largest magnitude of each column of every matmul's input."""

    def observed(self, op: int) -> list[float]: ...
    @property
    def kv_block_bytes(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...

class SpmTokenizer:
    """SentencePiece-style tokenizer: merging by score, byte fallback, special tokens."""

    def __init__(
        self,
        tokens: list[str],
        scores: _F32 | array[float],
        types: _U8 | bytes,
        unknown_id: int,
        add_space_prefix: bool,
        strip_after: Sequence[int],
    ) -> None: ...
    def encode(self, text: bytes, parse_special: bool) -> list[int]: ...

def test_matmul(
    isa: int,
    x: _F32,
    packed: _U8,
    n: int,
    elem: int,
    bits: int,
    group: int,
    zero: int,
    has_offset: bool,
    wide: bool,
    compute: int,
    norm_weight: _F32 | None,
    eps: float,
    bias: _F32 | None,
    residual: _F32 | None,
    gate: _F32 | None,
    act: int,
    outliers: _I32 | None,
    outlier_columns: _U16 | None,
    tiles: int,
    rows: int,
    out: _F32,
) -> None:
    """out = act(gate) * (norm(x) w^T + bias) + residual, in blocks of `tiles` tiles and `rows` rows."""

def test_embed(
    isa: int,
    packed: _U8,
    n: int,
    k: int,
    elem: int,
    bits: int,
    group: int,
    zero: int,
    has_offset: bool,
    wide: bool,
    ids: _I32,
    out: _F32,
) -> None:
    """out [ids, k] = the rows of the packed matrix."""

def test_attention(
    isa: int,
    q: _F32,
    k: _F32,
    v: _F32,
    out: _F32,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: _F32 | None,
    q_norm: _F32 | None,
    k_norm: _F32 | None,
    eps: float,
    norm_offset: float,
    cos: _F32 | None,
    sin: _F32 | None,
    exact: bool,
    kv_type: int,
    pool: _U8,
    row_start: _I32,
    context: _I32,
    block_start: _I32,
    blocks: _I32,
    threads: int,
    planned_threads: int,
) -> int:
    """One batch of attention over the paged KV in `pool`; the number of work items."""

def test_sampling(
    isa: int,
    logits: _F32,
    rows: _U8,
    history: _I32,
    bias_ids: _I32,
    bias_values: _F32,
    ban_ids: _I32,
    masks: _U32 | None,
    token: _I32,
    logprob: _F32,
    rank: _I32,
    top_ids: _I32,
    top_logprobs: _F32,
    status: _U8,
) -> None:
    """Samples every row of logits, which it overwrites."""

def test_uniform(seed: int, counter: int) -> float:
    """The number in [0, 1) that a draw uses."""

class TestTeamSize:
    """How many members of a team take part (native/team_size.h)."""

    def __init__(self, most: int) -> None: ...
    def ran(self, begin: float, end: float, away: float, waited: float) -> None:
        """A run: seconds on any clock; seconds off the CPU and at barriers, summed over the members."""

    @property
    def now(self) -> int: ...

class LimitBench:
    """What `threads` threads can do at most with an instruction set; the buffer they read is held."""

    def __init__(self, isa: str, threads: int, bytes: int) -> None:
        """bytes: size of the buffer. ValueError if the CPU or build does not have the instruction set."""

    @property
    def bytes(self) -> int: ...
    def instructions(self, kind: str) -> str | None:
        """What "int8", "bf16" or "fp32" multiply-adds are measured with; None if there are none."""

    def read(self) -> float:
        """Seconds in which all threads together read the buffer once."""

    def peak(self, kind: str, seconds: float) -> float:
        """Operations per second of all threads together, measured for about `seconds`."""
