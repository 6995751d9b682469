"""Pieces shared by the FlashAttention-2 kernels: where a program stands, tile loads, the score and its derivative.

A program handles one tile of one (sequence, head). Row i of a sequence stands at key position i + seqlen_k - seqlen_q.
Scores are kept in log2 units: exp(x) = exp2(x * log2 e), with log2 e folded into softmax_scale.
"""

import triton
import triton.language as tl

from ...target import interpreting
from .. import ranges

UNLIMITED = tl.constexpr(ranges.UNLIMITED)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# The interpreter runs plain functions as they are and refuses to wrap those of a module without triton.language.
_device_function = (lambda fn: fn) if interpreting() else triton.jit

key_range = _device_function(ranges.key_range)
full_key_range = _device_function(ranges.full_key_range)
query_range = _device_function(ranges.query_range)
full_query_range = _device_function(ranges.full_query_range)
seen_keys = _device_function(ranges.seen_keys)
seeing_rows = _device_function(ranges.seeing_rows)


@triton.jit
def first_row(cu_seqlens, sequence, total):
    """Of a sequence, in range whatever cu_seqlens holds. The first starts at 0: nobody would write rows before it."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), total) * tl.minimum(sequence, 1)


@triton.jit
def locate_tile(tile, cu_seqlens, batch, total, BLOCK: tl.constexpr):
    """Sequence and block of a varlen tile: sequence b owns the tiles from cu[b] // BLOCK + b on.

    That reserves at least ceil(length / BLOCK) tiles for each sequence, needs no pass over the lengths, and bounds the
    grid by total // BLOCK + batch + 1 whatever max_seqlen is. "Sequence" number ``batch`` is the rows after the last
    one. Returns (sequence, block, first row, rows).
    """
    low = 0
    high = batch + 1
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle), 0), total)
        if first // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    start = first_row(cu_seqlens, low, total)
    end = total
    if low < batch:
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + low + 1), start), total)
    return low, tile - (start // BLOCK + low), start, end - start


@triton.jit
def other_side(sequence, cu_seqlens, batch, total):
    """First row and number of rows of a sequence in the other packed tensor; none for the rows after the last one."""
    start = first_row(cu_seqlens, sequence, total)
    rows = 0
    if sequence < batch:
        rows = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), start), total) - start
    return start, rows


@triton.jit
def used_length(seqused, sequence, batch, rows):
    """Rows of a sequence that count: all of them, or seqused of them."""
    used = rows
    if seqused is not None:
        if sequence < batch:
            used = tl.minimum(tl.maximum(tl.load(seqused + sequence), 0), rows)
    return used


@triton.jit
def load_tile(base, start, stride, lo, hi, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
              UNIT: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Rows [start, start + ROWS) of a (rows, DIM) matrix as (ROWS, BLOCK_DIM); zeros past DIM and, if MASKED, outside
    [lo, hi). ``stride`` counts UNIT elements: multiplied here, it is seen to be divisible, and loads are vectorised.
    """
    rows = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    pointers = base + tl.cast(start, tl.int64) * stride * UNIT
    if WIDE:
        pointers = pointers + (rows.to(tl.int64) * stride * UNIT)[:, None] + offs_d[None, :]
    else:
        pointers = pointers + (rows * stride * UNIT)[:, None] + offs_d[None, :]
    inside = (start + rows >= lo) & (start + rows < hi)
    if MASKED and DIM != BLOCK_DIM:
        return tl.load(pointers, mask=inside[:, None] & (offs_d < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    elif DIM != BLOCK_DIM:
        return tl.load(pointers, mask=(offs_d < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_row(base, offs, hi, MASKED: tl.constexpr):
    """Values at ``offs``; zeros from ``hi`` on if MASKED."""
    if MASKED:
        return tl.load(base + offs, mask=offs < hi, other=0.0)
    else:
        return tl.load(base + offs)


@triton.jit
def store_tile(base, start, stride, hi, tile, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """The reverse of load_tile, for rows below ``hi``."""
    rows = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    pointers = base + tl.cast(start, tl.int64) * stride
    if WIDE:
        pointers = pointers + (rows.to(tl.int64) * stride)[:, None] + offs_d[None, :]
    else:
        pointers = pointers + (rows * stride)[:, None] + offs_d[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(start + rows < hi)[:, None] & (offs_d < DIM)[None, :])


@triton.jit
def once(start, end):
    """1 if [start, end) is not empty, else 0: the turns of a loop that stands for a branch around a tile loop.

    ptxas serialises the matrix instructions of tile loops that follow each other on one accumulator (its note C7515).
    Something must part them, and a plain branch LLVM may merge with the tile loop's own guard.
    """
    return tl.minimum(tl.maximum(end - start, 0), 1)


@triton.jit
def visible(offs_q, offs_k, seqlen_q, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which pairs exist and see each other. ``offs_q`` and ``offs_k`` broadcast against each other."""
    position = offs_q + (seqlen_k - seqlen_q)
    ok = (offs_q < seqlen_q) & (offs_k < seqlen_k)
    if HAS_RIGHT:
        ok = ok & (offs_k <= position + right)
    if HAS_LEFT:
        ok = ok & (offs_k >= position - left)
    return ok


@triton.jit
def tanh(x):
    """tanh to about fp32 accuracy in Triton's own operations (libdevice has it only on some targets)."""
    small = x * (1 + x * x * (-0.33333334 + x * x * (0.13333334 + x * x * -0.053968254)))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    large = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def score(s, scale, softcap, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr = False):
    """q.k to the score, in log2 units unless NATURAL. Without softcap ``scale`` carries the log2 e."""
    if SOFTCAP:
        s = tanh(s * (scale / softcap)) * (softcap if NATURAL else softcap * LOG2_E)
    else:
        s = s * scale
    return s


@triton.jit
def softcap_gradient(s, softcap, NATURAL: tl.constexpr = False):
    """d score / d (scale q.k), from the capped score: 1 - tanh^2."""
    t = s / (softcap if NATURAL else softcap * LOG2_E)
    return 1 - t * t
