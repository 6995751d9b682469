"""What surrounds the backward kernel: lse and delta in its order before it, dQ from its sum after it. Orders go
by tile of BLOCK_M rows of all sequences (numbered as by fa2.common.locate_tile), then head."""

import triton
import triton.language as tl

from ..fa2.common import LOG2_E, locate_tile


@triton.jit
def _locate_rows(tile, cu_seqlens_q, batch, seqlen_q, BLOCK_M: tl.constexpr):
    """Batch entry of a tile (packed: 0), its first row there, and how many rows from there on are the sequence's."""
    if cu_seqlens_q is not None:
        _sequence, block, start, rows = locate_tile(tile, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
        return 0, start + block * BLOCK_M, rows - block * BLOCK_M
    num_m = tl.cdiv(seqlen_q, BLOCK_M)
    first = tile % num_m * BLOCK_M
    return tile // num_m, first, seqlen_q - first


@triton.jit(do_not_specialize=["batch", "num_heads", "seqlen_q"])
def _attn_bwd_preprocess_kernel(
    out, dout, lse, dlse, lse_delta, dq_sum, cu_seqlens_q,
    stride_dob, stride_dom, stride_doh, stride_dlb, stride_dlh, stride_dlm,
    batch, num_heads, seqlen_q,
    softmax_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, START: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout) - dlse, lse in log2 units, and zeros in dq_sum, for one tile of rows and one head.

    lse_delta has, for each tile and head, BLOCK_M of lse, then as many of delta. Rows past the sequence, and rows that
    see nothing, get lse = inf, so that their weights are 0, and delta 0. Row 16 a + 8 b + 2 c + d of a tile is at
    16 a + 4 c + 2 b + d, so that a thread of the backward kernel finds its rows together. With START they are what S
    (before the scale) and dP start at: -lse / softmax_scale and -delta."""
    pid = tl.program_id(0)
    h = pid % num_heads
    b, first, rows = _locate_rows(pid // num_heads, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
    i = tl.arange(0, BLOCK_M)
    m = first + i
    b = tl.cast(b, tl.int64)
    inside = i < rows
    offs_d = tl.arange(0, BLOCK_DV)
    both = inside[:, None] & (offs_d < HEAD_DIM_V)[None, :]
    row = ((b * seqlen_q + m) * num_heads + h)[:, None]
    o_i = tl.load(out + row * HEAD_DIM_V + offs_d[None, :], mask=both, other=0.0)
    place = b * stride_dob + tl.cast(m, tl.int64) * stride_dom + tl.cast(h, tl.int64) * stride_doh
    do_i = tl.load(dout + (place * UNIT)[:, None] + offs_d[None, :], mask=both, other=0.0)
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)
    if dlse is not None:
        place = b * stride_dlb + tl.cast(m, tl.int64) * stride_dlm + tl.cast(h, tl.int64) * stride_dlh
        delta_i -= tl.load(dlse + place, mask=inside, other=0.0)
    lse_i = tl.load(lse + (b * num_heads + h) * seqlen_q + m, mask=inside, other=float("-inf"))
    empty = lse_i == float("-inf")
    to = lse_delta + tl.cast(pid, tl.int64) * (2 * BLOCK_M) + i // 16 * 16 + i % 8 // 2 * 4 + i // 8 % 2 * 2 + i % 2
    lse_i = tl.where(empty, float("inf"), lse_i)
    tl.store(to, lse_i / -softmax_scale if START else lse_i * LOG2_E)
    delta_i = tl.where(empty, 0.0, delta_i)
    tl.store(to + BLOCK_M, -delta_i if START else delta_i)
    if dq_sum is not None:
        d = tl.arange(0, BLOCK_D)
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if BULK:
            tl.store(dq_sum + row * HEAD_DIM + d[None, :], zeros, mask=inside[:, None] & (d < HEAD_DIM)[None, :])
        else:
            tile = dq_sum + tl.cast(pid, tl.int64) * (BLOCK_M * BLOCK_D)
            tl.store(tile + i[:, None] * BLOCK_D + d[None, :], zeros)


@triton.jit(do_not_specialize=["batch", "num_heads", "seqlen_q"])
def _attn_bwd_convert_kernel(
    dq_sum, dq, cu_seqlens_q, batch, num_heads, seqlen_q, softmax_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * dq_sum for one tile of rows and one head. dq is contiguous. With BULK, the copy engine has
    added, and dq_sum is as dq. Else a tile of it is in two halves (of 64 rows the columns, of 128 the rows), each as a
    warpgroup of the backward kernel holds it in registers: by column // 8, row // 16, row % 8, column % 8 // 2,
    row % 16 // 8, column % 2."""
    WIDTH: tl.constexpr = BLOCK_D // 2 if BLOCK_M == 64 else BLOCK_D
    pid = tl.program_id(0)
    h = pid % num_heads
    b, first, rows = _locate_rows(pid // num_heads, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (i < rows)[:, None] & (d < HEAD_DIM)[None, :]
    row = (tl.cast(b, tl.int64) * seqlen_q + first + i) * num_heads + h
    to = row[:, None] * HEAD_DIM + d[None, :]
    if BULK:
        place = dq_sum + to
    else:
        from_row = i // 64 * (64 * WIDTH) + i % 64 // 16 * 128 + i % 8 * 16 + i // 8 % 2 * 2
        from_column = d // WIDTH * (64 * WIDTH) + d % WIDTH // 8 * 512 + d % 8 // 2 * 4 + d % 2
        tile = dq_sum + tl.cast(pid, tl.int64) * (BLOCK_M * BLOCK_D)
        place = tile + from_row[:, None] + from_column[None, :]
    x = tl.load(place, mask=inside)
    tl.store(dq + to, (x * softmax_scale).to(dq.dtype.element_ty), mask=inside)
