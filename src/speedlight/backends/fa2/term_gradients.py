"""Gradients of what is added to scores: of a bias tensor, at its own shape, and of ALiBi slopes and sinks. As in
backward.py every result has one writer, so runs repeat bitwise.

With dS = P * (dP - delta), dL/dbias is dS summed over the axes along which the bias is broadcast. The slopes' part of
each row, -sum_j dS |i + Sk - Sq - j|, comes from the kernel of dQ; a sink has the weight exp(sink - lse) and no value,
so its gradient is -sum exp(sink - lse) delta.
"""

import triton
import triton.language as tl

from .backward import score_gradients
from .common import (
    LOG2_E,
    UNLIMITED,
    key_range,
    load_row,
    load_tile,
    other_side,
    seeing_rows,
    seen_keys,
    used_length,
)
from .forward import SIZES
from .terms import start_terms


@triton.jit(do_not_specialize=[*SIZES, "splits"])
def _attn_bwd_dbias_kernel(
    q, k, v, dout, lse, delta, dbias, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    alibi_slopes, bias, mask, dropout_seed,
    bias_aux0, bias_aux1, bias_aux2, bias_aux3, mask_aux0, mask_aux1, mask_aux2, mask_aux3,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_dob, stride_dom, stride_doh,
    batch, num_heads, group_size, seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap,
    stride_ab, stride_bb, stride_bh, stride_bm, stride_bn, bias_rows, bias_keys,
    stride_mb, stride_mh, stride_mm, stride_mn, mask_rows, mask_keys, threshold, keep_scale, splits,
    BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr,
    NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr,
    PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr, PER_ROW: tl.constexpr, PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dbias (splits, B or 1, H or 1, rows or 1, keys or 1), fp32. A program makes one tile of it from each splits-th
    of the tiles of pairs that are summed there."""
    left = window_left if HAS_LEFT else UNLIMITED
    right = window_right if HAS_RIGHT else UNLIMITED
    scale = softmax_scale if SOFTCAP or NATURAL else softmax_scale * LOG2_E
    tiles_m = tl.cdiv(bias_rows, BLOCK_M) if PER_ROW else 1
    tiles_n = tl.cdiv(bias_keys, BLOCK_N) if PER_KEY else 1
    pid = tl.program_id(0)
    own_n, rest = pid % tiles_n, pid // tiles_n
    own_m, rest = rest % tiles_m, rest // tiles_m
    own_h, rest = (rest % num_heads, rest // num_heads) if PER_HEAD else (0, rest)
    own_b, split = (rest % batch, rest // batch) if PER_BATCH else (0, rest)
    all_m = 1 if PER_ROW else tl.cdiv(seqlen_q, BLOCK_M)
    all_n = 1 if PER_KEY else tl.cdiv(seqlen_k, BLOCK_N)
    all_h = 1 if PER_HEAD else num_heads
    all_b = 1 if PER_BATCH else batch
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in range(split, all_b * all_h * all_m * all_n, splits):
        start_n = (own_n if PER_KEY else n % all_n) * BLOCK_N
        start_m = (own_m if PER_ROW else n // all_n % all_m) * BLOCK_M
        h = own_h if PER_HEAD else n // all_n // all_m % all_h
        b = own_b if PER_BATCH else n // all_n // all_m // all_h
        batch_row = b
        q_start, q_rows, k_start, k_rows = 0, seqlen_q, 0, seqlen_k
        if cu_seqlens_q is not None:
            batch_row = 0
            q_start, q_rows = other_side(b, cu_seqlens_q, batch, seqlen_q)
            k_start, k_rows = other_side(b, cu_seqlens_k, batch, seqlen_k)
        used_q = used_length(seqused_q, b, batch, q_rows)
        used_k = used_length(seqused_k, b, batch, k_rows)
        lo, hi = key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
        if (start_m < used_q) & (start_n < hi) & (start_n + BLOCK_N > lo):
            row = tl.cast(batch_row, tl.int64)
            q_h = q + (row * stride_qb + tl.cast(h, tl.int64) * stride_qh) * UNIT
            q_h += tl.cast(q_start, tl.int64) * stride_qm * UNIT
            do_h = dout + (row * stride_dob + tl.cast(h, tl.int64) * stride_doh) * UNIT
            do_h += tl.cast(q_start, tl.int64) * stride_dom * UNIT
            k_h = k + (row * stride_kb + tl.cast(h // group_size, tl.int64) * stride_kh) * UNIT
            k_h += tl.cast(k_start, tl.int64) * stride_kn * UNIT
            v_h = v + (row * stride_vb + tl.cast(h // group_size, tl.int64) * stride_vh) * UNIT
            v_h += tl.cast(k_start, tl.int64) * stride_vn * UNIT
            first_lse = (row * num_heads + h) * seqlen_q + q_start
            offs_m = start_m + tl.arange(0, BLOCK_M)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            seen_lo, _ = seen_keys(used_q, used_k, left, right)
            seeing_lo, seeing_hi = seeing_rows(used_q, used_k, left, right)
            q_i = load_tile(
                q_h, start_m, stride_qm, seeing_lo, seeing_hi, HEAD_DIM, BLOCK_M, BLOCK_D, UNIT, WIDE, True
            )  # fmt: skip
            do_i = load_tile(
                do_h, start_m, stride_dom, seeing_lo, seeing_hi, HEAD_DIM_V, BLOCK_M, BLOCK_DV, UNIT, WIDE, True
            )  # fmt: skip
            k_j = load_tile(k_h, start_n, stride_kn, seen_lo, used_k, HEAD_DIM, BLOCK_N, BLOCK_D, UNIT, WIDE, True)
            v_j = load_tile(v_h, start_n, stride_vn, seen_lo, used_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, UNIT, WIDE, True)
            lse_i = load_row(lse + first_lse, offs_m, used_q, True)
            delta_i = load_row(delta + first_lse, offs_m, used_q, True)
            terms = (
                b, h, q_start, k_start, alibi_slopes,
                (bias, (stride_bm, stride_bn, bias_rows, bias_keys), (bias_aux0, bias_aux1, bias_aux2, bias_aux3)),
                (mask, (stride_mm, stride_mn, mask_rows, mask_keys), (mask_aux0, mask_aux1, mask_aux2, mask_aux3)),
                dropout_seed, threshold,
                start_terms(
                    b, h, batch, alibi_slopes, stride_ab, bias, stride_bb, stride_bh, mask, stride_mb, stride_mh,
                    dropout_seed, NATURAL
                ),
            )  # fmt: skip
            ds, _s, _capped = score_gradients(
                q_i, do_i, lse_i, delta_i, k_j, v_j, offs_m, offs_n, used_q, used_k, left, right, scale, softcap, terms,
                keep_scale, SOFTCAP, HAS_LEFT, HAS_RIGHT, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES, NATURAL, HIDES,
                DROPOUT, PRECISION, True,
            )  # fmt: skip
            sums += ds
    own_rows = own_m * BLOCK_M + tl.arange(0, BLOCK_M)
    own_keys = own_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = bias_rows if PER_ROW else 1
    keys = bias_keys if PER_KEY else 1
    dbias += (pid // tiles_n // tiles_m).to(tl.int64) * rows * keys
    if PER_ROW and PER_KEY:
        to = dbias + (own_rows.to(tl.int64) * keys)[:, None] + own_keys[None, :]
        tl.store(to, sums, mask=(own_rows < rows)[:, None] & (own_keys < keys)[None, :])
    elif PER_ROW:
        tl.store(dbias + own_rows, tl.sum(sums, 1), mask=own_rows < rows)
    elif PER_KEY:
        tl.store(dbias + own_keys, tl.sum(sums, 0), mask=own_keys < keys)
    else:
        tl.store(dbias, tl.sum(tl.sum(sums, 1), 0))


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def _attn_bwd_heads_kernel(
    lse, delta, dslopes, sink, dslope, dsink, cu_seqlens_q, batch, num_heads, seqlen_q, BLOCK_M: tl.constexpr
):  # fmt: skip
    """dslope and dsink, (B, H) fp32: the sums over one sequence's rows of dslopes, which is as lse, and of the sink's
    part."""
    pid = tl.program_id(0)
    b, h = pid // num_heads, pid % num_heads
    start, rows, batch_row = 0, seqlen_q, b
    if cu_seqlens_q is not None:
        start, rows = other_side(b, cu_seqlens_q, batch, seqlen_q)
        batch_row = 0
    first_lse = (tl.cast(batch_row, tl.int64) * num_heads + h) * seqlen_q + start
    of_slopes = tl.zeros([BLOCK_M], tl.float32)
    of_sinks = tl.zeros([BLOCK_M], tl.float32)
    for m in range(0, rows, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        if dslope is not None:
            of_slopes += load_row(dslopes + first_lse, offs_m, rows, True)
        if dsink is not None:
            lse_i = tl.load(lse + first_lse + offs_m, mask=offs_m < rows, other=float("-inf"))
            delta_i = load_row(delta + first_lse, offs_m, rows, True)
            empty = lse_i == float("-inf")
            s = tl.load(sink + h).to(tl.float32) - tl.where(empty, 0.0, lse_i)
            of_sinks -= tl.where(empty, 0.0, tl.exp2(s * LOG2_E) * delta_i)
    if dslope is not None:
        tl.store(dslope + pid, tl.sum(of_slopes, 0))
    if dsink is not None:
        tl.store(dsink + pid, tl.sum(of_sinks, 0))
