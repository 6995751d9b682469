"""FlashAttention-2 backward, in two kernels without atomics: every result has one writer, so runs repeat bitwise.

From S recomputed as in the forward and P = exp(S - lse), with g = dL/dlse:

    delta = rowsum(out * dout) - g                 (folding g in here gives the gradient through lse)
    dP = dO V^T          dS = P * (dP - delta)
    dQ = scale * dS K                              (kernel 1, per block of rows, which also stores delta)
    dV = P^T dO          dK = scale * dS^T Q       (kernel 2, per key block, summed over the query heads of its group)

Where dQ is not asked for, delta has a kernel of its own.

With softcap dS carries the factor 1 - tanh^2. Recomputing S and dP in both passes costs 7 products instead of 5, and
saves the fp32 accumulator for dQ and its atomic adds.

Shapes as in forward.py; dout as out; delta as lse. Source: Dao, "FlashAttention-2" (2023), section 3.1, algorithm 2.
"""

import triton
import triton.language as tl

from .common import (
    LOG2_E,
    UNLIMITED,
    full_key_range,
    full_query_range,
    key_range,
    load_row,
    load_tile,
    locate_tile,
    once,
    other_side,
    query_range,
    score,
    seeing_rows,
    seen_keys,
    softcap_gradient,
    store_tile,
    used_length,
    visible,
)
from .forward import SIZES
from .terms import distance, kept, start_terms, take_part, weights, with_terms


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "num_rows"])
def _attn_bwd_delta_kernel(
    out, dout, lse, dlse, delta,
    stride_dob, stride_dom, stride_doh, stride_dlb, stride_dlh, stride_dlm,
    num_heads, seqlen_q, num_rows,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta for BLOCK_M of the B * Sq rows of one head; varlen is one long sequence here."""
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    pid = tl.program_id(0)
    h = pid // num_blocks
    rows = (pid % num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_DV)
    b = rows // seqlen_q
    m = rows % seqlen_q
    inside = rows < num_rows
    both = inside[:, None] & (offs_d < HEAD_DIM_V)[None, :]
    o_i = tl.load(out + ((rows * num_heads + h) * HEAD_DIM_V)[:, None] + offs_d[None, :], mask=both, other=0.0)
    do_i = tl.load(
        dout + (b * stride_dob + m * stride_dom + tl.cast(h, tl.int64) * stride_doh)[:, None] + offs_d[None, :],
        mask=both, other=0.0,
    )  # fmt: skip
    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)
    if dlse is not None:
        dlse += tl.cast(h, tl.int64) * stride_dlh
        delta_i -= tl.load(dlse + b * stride_dlb + m * stride_dlm, mask=inside, other=0.0)
    place = (b * num_heads + h) * seqlen_q + m
    lse_i = tl.load(lse + place, mask=inside, other=0.0)
    # Rows that see nothing have gradient 0, whatever their dout holds.
    tl.store(delta + place, tl.where(lse_i == float("-inf"), 0.0, delta_i), mask=inside)


@triton.jit
def _accumulate_dkdv(dk, dv, k_j, v_j, q, dout, lse, delta, stride_qm, stride_dom, start, end, offs_n, seqlen_q,
                     seqlen_k, seeing_lo, seeing_hi, left, right, scale, softcap, terms, keep_scale,
                     HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr,
                     HAS_RIGHT: tl.constexpr, BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr,
                     MASK_AXES: tl.constexpr, NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr,
                     NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
                     MASKED: tl.constexpr):  # fmt: skip
    """Add the rows of [start, end) to (dk, dv). Everything is transposed: keys along the first axis."""
    for m in tl.range(start, end, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        # Rows that see nothing load as zeros: a NaN there would survive the product with a weight of 0.
        q_i = load_tile(q, m, stride_qm, seeing_lo, seeing_hi, HEAD_DIM, BLOCK_M, BLOCK_D, UNIT, WIDE, MASKED)
        lse_i = load_row(lse, offs_m, seqlen_q, MASKED)
        s_t = score(tl.dot(k_j, tl.trans(q_i), input_precision=PRECISION), scale, softcap, SOFTCAP, NATURAL)
        do_i = load_tile(dout, m, stride_dom, seeing_lo, seeing_hi, HEAD_DIM_V, BLOCK_M, BLOCK_DV, UNIT, WIDE, MASKED)
        if NEED_DK:  # before the exponentials, which then run beside it
            dp_t = tl.dot(v_j, tl.trans(do_i), input_precision=PRECISION)
        capped = s_t
        s_t = with_terms(
            s_t, offs_m[None, :], offs_n[:, None], seqlen_q, seqlen_k, terms, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES
        )  # fmt: skip
        p_t = weights(s_t, (lse_i if NATURAL else lse_i * LOG2_E)[None, :], NATURAL)
        if MASKED:
            ok = visible(offs_m[None, :], offs_n[:, None], seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
            if HIDES:
                s_t = tl.where(ok, s_t, float("-inf"))
            else:
                p_t = tl.where(ok, p_t, 0.0)
        if HIDES:
            p_t = tl.where(s_t == float("-inf"), 0.0, p_t)
            do_i = take_part(do_i, s_t)
        if NEED_DV:
            kept_t = kept(p_t, offs_m[None, :], offs_n[:, None], terms)
            dv = tl.dot(kept_t.to(do_i.dtype), do_i, dv, input_precision=PRECISION)
        if NEED_DK:
            delta_i = load_row(delta, offs_m, seqlen_q, MASKED)
            if DROPOUT:
                dp_t = kept(dp_t * keep_scale, offs_m[None, :], offs_n[:, None], terms)
            ds_t = p_t * (dp_t - delta_i[None, :])
            if HIDES:
                ds_t = tl.where(s_t == float("-inf"), 0.0, ds_t)
                q_i = take_part(q_i, s_t)
            if SOFTCAP:
                ds_t = ds_t * softcap_gradient(capped, softcap, NATURAL)
            dk = tl.dot(ds_t.to(q_i.dtype), q_i, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _attn_bwd_dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    alibi_slopes, bias, mask, dropout_seed,
    bias_aux0, bias_aux1, bias_aux2, bias_aux3, mask_aux0, mask_aux1, mask_aux2, mask_aux3,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_dob, stride_dom, stride_doh,
    batch, num_heads, seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap,
    stride_ab, stride_bb, stride_bh, stride_bm, stride_bn, bias_rows, bias_keys,
    stride_mb, stride_mh, stride_mm, stride_mn, mask_rows, mask_keys, threshold, keep_scale,
    BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr,
    NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    PRECISION: tl.constexpr, TAIL: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    left = window_left if HAS_LEFT else UNLIMITED
    right = window_right if HAS_RIGHT else UNLIMITED
    num_heads_kv = num_heads // GROUP_SIZE
    lse_rows = seqlen_q
    if cu_seqlens_q is not None:
        b, block, k_start, k_rows = locate_tile(pid // num_heads_kv, cu_seqlens_k, batch, seqlen_k, BLOCK_N)
        hk = pid % num_heads_kv
        q_start, q_rows = other_side(b, cu_seqlens_q, batch, seqlen_q)
        if block * BLOCK_N >= k_rows:
            return
    else:
        num_n = tl.cdiv(seqlen_k, BLOCK_N)
        block = pid % num_n
        b = pid // num_n // num_heads_kv
        hk = pid // num_n % num_heads_kv
        q_start, q_rows, k_start, k_rows = 0, seqlen_q, 0, seqlen_k
    used_q = used_length(seqused_q, b, batch, q_rows)
    used_k = used_length(seqused_k, b, batch, k_rows)

    start_n = block * BLOCK_N
    batch_row = b if cu_seqlens_q is None else 0
    q += tl.cast(batch_row, tl.int64) * stride_qb * UNIT + tl.cast(q_start, tl.int64) * stride_qm * UNIT
    dout += tl.cast(batch_row, tl.int64) * stride_dob * UNIT + tl.cast(q_start, tl.int64) * stride_dom * UNIT
    k += tl.cast(batch_row, tl.int64) * stride_kb * UNIT + tl.cast(hk, tl.int64) * stride_kh * UNIT
    k += tl.cast(k_start, tl.int64) * stride_kn * UNIT
    v += tl.cast(batch_row, tl.int64) * stride_vb * UNIT + tl.cast(hk, tl.int64) * stride_vh * UNIT
    v += tl.cast(k_start, tl.int64) * stride_vn * UNIT
    first_lse = tl.cast(batch_row, tl.int64) * num_heads * lse_rows + q_start

    offs_n = start_n + tl.arange(0, BLOCK_N)
    seen_lo, seen_hi = seen_keys(used_q, used_k, left, right)
    seeing_lo, seeing_hi = seeing_rows(used_q, used_k, left, right)
    k_j = load_tile(k, start_n, stride_kn, seen_lo, used_k, HEAD_DIM, BLOCK_N, BLOCK_D, UNIT, WIDE, True)
    v_j = load_tile(v, start_n, stride_vn, seen_lo, used_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, UNIT, WIDE, True)
    dk_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_j = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    scale = softmax_scale if SOFTCAP or NATURAL else softmax_scale * LOG2_E

    lo, hi = query_range(start_n, start_n + BLOCK_N, used_q, used_k, left, right)
    full_lo, full_hi = full_query_range(start_n, start_n + BLOCK_N, used_q, used_k, left, right)
    lo = lo // BLOCK_M * BLOCK_M
    full_lo = tl.minimum(tl.cdiv(full_lo, BLOCK_M) * BLOCK_M, tl.cdiv(hi, BLOCK_M) * BLOCK_M)
    full_hi = tl.maximum(full_hi // BLOCK_M * BLOCK_M, full_lo)
    ALONE: tl.constexpr = not (HAS_LEFT or HAS_RIGHT or TAIL)
    for member in range(GROUP_SIZE):
        h = hk * GROUP_SIZE + member
        q_h = q + tl.cast(h, tl.int64) * stride_qh * UNIT
        dout_h = dout + tl.cast(h, tl.int64) * stride_doh * UNIT
        lse_h = lse + first_lse + tl.cast(h, tl.int64) * lse_rows
        delta_h = lse_h
        if NEED_DK:
            delta_h = delta + first_lse + tl.cast(h, tl.int64) * lse_rows
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
        for part in tl.static_range(3):  # as in the forward
            if part == 1 or (part == 0 and HAS_RIGHT) or (part == 2 and (HAS_LEFT or TAIL)):
                start = lo if part == 0 else (full_lo if part == 1 else full_hi)
                end = full_lo if part == 0 else (full_hi if part == 1 else hi)
                for _ in range(1 if ALONE else once(start, end)):
                    dk_j, dv_j = _accumulate_dkdv(
                        dk_j, dv_j, k_j, v_j, q_h, dout_h, lse_h, delta_h, stride_qm, stride_dom, start, end, offs_n,
                        used_q, used_k, seeing_lo, seeing_hi, left, right, scale, softcap, terms, keep_scale, HEAD_DIM,
                        HEAD_DIM_V, SOFTCAP, HAS_LEFT, HAS_RIGHT, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES, NATURAL,
                        HIDES, DROPOUT, NEED_DK, NEED_DV, PRECISION, BLOCK_M, BLOCK_D, BLOCK_DV, UNIT, WIDE, part != 1,
                    )  # fmt: skip

    # Keys that no row sees have gradient 0; the weights of padding keys above came from zeros.
    seen = ((offs_n >= seen_lo) & (offs_n < seen_hi))[:, None]
    row0 = tl.cast(batch_row, tl.int64) * seqlen_k + k_start
    if NEED_DK:
        dk += row0 * num_heads_kv * HEAD_DIM + hk * HEAD_DIM
        dk_j = tl.where(seen, dk_j * softmax_scale, 0.0)
        store_tile(dk, start_n, num_heads_kv * HEAD_DIM, k_rows, dk_j, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
    if NEED_DV:
        dv += row0 * num_heads_kv * HEAD_DIM_V + hk * HEAD_DIM_V
        dv_j = tl.where(seen, dv_j * keep_scale if DROPOUT else dv_j, 0.0)
        store_tile(dv, start_n, num_heads_kv * HEAD_DIM_V, k_rows, dv_j, HEAD_DIM_V, BLOCK_N, BLOCK_DV, WIDE)


@triton.jit
def _accumulate_dq(dq, slope_i, q_i, do_i, lse_i, delta_i, k, v, stride_kn, stride_vn, start, end, offs_m, seqlen_q,
                   seqlen_k, seen_lo, left, right, scale, softcap, terms, keep_scale, HEAD_DIM: tl.constexpr,
                   HEAD_DIM_V: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                   BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr,
                   NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr, NEED_SLOPES: tl.constexpr,
                   PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                   UNIT: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the keys of [start, end) to dq, and to the rows' part in the slopes' gradient. ``lse_i`` is in the scores'
    unit."""
    for n in tl.range(start, end, BLOCK_N):
        k_j = load_tile(k, n, stride_kn, seen_lo, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, UNIT, WIDE, MASKED)
        v_j = load_tile(v, n, stride_vn, seen_lo, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, UNIT, WIDE, MASKED)
        offs_n = n + tl.arange(0, BLOCK_N)
        ds, s, capped = score_gradients(
            q_i, do_i, lse_i, delta_i, k_j, v_j, offs_m, offs_n, seqlen_q, seqlen_k, left, right, scale, softcap, terms,
            keep_scale, SOFTCAP, HAS_LEFT, HAS_RIGHT, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES, NATURAL, HIDES, DROPOUT,
            PRECISION, MASKED,
        )  # fmt: skip
        if NEED_SLOPES:
            slope_i -= tl.sum(ds * distance(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k), 1)
        if HIDES:
            k_j = take_part(k_j, s)
        if SOFTCAP:
            ds = ds * softcap_gradient(capped, softcap, NATURAL)
        dq = tl.dot(ds.to(k_j.dtype), k_j, dq, input_precision=PRECISION)
    return dq, slope_i


@triton.jit
def score_gradients(q_i, do_i, lse_i, delta_i, k_j, v_j, offs_m, offs_n, seqlen_q, seqlen_k, left, right, scale,
                    softcap, terms, keep_scale, SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                    BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr,
                    NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                    MASKED: tl.constexpr):  # fmt: skip
    """dL / d(score, all terms added) of a tile of pairs; those scores (if HIDES, -inf where hidden), and those before
    the terms. ``lse_i`` is in the scores' unit."""
    s = score(tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION), scale, softcap, SOFTCAP, NATURAL)
    dp = tl.dot(do_i, tl.trans(v_j), input_precision=PRECISION)
    capped = s
    s = with_terms(
        s, offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, terms, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES
    )  # fmt: skip
    p = weights(s, lse_i[:, None], NATURAL)
    if MASKED:
        ok = visible(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
        if HIDES:
            s = tl.where(ok, s, float("-inf"))
        else:
            p = tl.where(ok, p, 0.0)
    if DROPOUT:
        dp = kept(dp * keep_scale, offs_m[:, None], offs_n[None, :], terms)
    ds = p * (dp - delta_i[:, None])
    if HIDES:
        ds = tl.where(s == float("-inf"), 0.0, ds)
    return ds, s, capped


@triton.jit
def _row_products(out, dout, start, stride_om, stride_dom, lo, hi, DIM: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """rowsum(out * dout) over DIM columns; 0 outside [lo, hi)."""
    o_i = load_tile(out, start, stride_om, lo, hi, DIM, ROWS, BLOCK, 1, WIDE, True)
    do_i = load_tile(dout, start, stride_dom, lo, hi, DIM, ROWS, BLOCK, UNIT, WIDE, True)
    return tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)


@triton.jit(do_not_specialize=SIZES)
def _attn_bwd_dq_kernel(
    q, k, v, dout, out, lse, dlse, delta, dq, dslopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    alibi_slopes, bias, mask, dropout_seed,
    bias_aux0, bias_aux1, bias_aux2, bias_aux3, mask_aux0, mask_aux1, mask_aux2, mask_aux3,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_dob, stride_dom, stride_doh, stride_dlb, stride_dlh, stride_dlm,
    batch, num_heads, group_size, seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap,
    stride_ab, stride_bb, stride_bh, stride_bm, stride_bn, bias_rows, bias_keys,
    stride_mb, stride_mh, stride_mm, stride_mn, mask_rows, mask_keys, threshold, keep_scale,
    BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr,
    NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    left = window_left if HAS_LEFT else UNLIMITED
    right = window_right if HAS_RIGHT else UNLIMITED
    lse_rows = seqlen_q
    if cu_seqlens_q is not None:
        b, block, q_start, q_rows = locate_tile(pid // num_heads, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
        h = pid % num_heads
        k_start, k_rows = other_side(b, cu_seqlens_k, batch, seqlen_k)
        if block * BLOCK_M >= q_rows:
            return
    else:
        num_m = tl.cdiv(seqlen_q, BLOCK_M)
        block = num_m - 1 - pid % num_m
        b = pid // num_m // num_heads
        h = pid // num_m % num_heads
        q_start, q_rows, k_start, k_rows = 0, seqlen_q, 0, seqlen_k
    used_q = used_length(seqused_q, b, batch, q_rows)
    used_k = used_length(seqused_k, b, batch, k_rows)

    start_m = block * BLOCK_M
    batch_row = b if cu_seqlens_q is None else 0
    q += tl.cast(batch_row, tl.int64) * stride_qb * UNIT + tl.cast(h, tl.int64) * stride_qh * UNIT
    q += tl.cast(q_start, tl.int64) * stride_qm * UNIT
    dout += tl.cast(batch_row, tl.int64) * stride_dob * UNIT + tl.cast(h, tl.int64) * stride_doh * UNIT
    dout += tl.cast(q_start, tl.int64) * stride_dom * UNIT
    k += tl.cast(batch_row, tl.int64) * stride_kb * UNIT + tl.cast(h // group_size, tl.int64) * stride_kh * UNIT
    k += tl.cast(k_start, tl.int64) * stride_kn * UNIT
    v += tl.cast(batch_row, tl.int64) * stride_vb * UNIT + tl.cast(h // group_size, tl.int64) * stride_vh * UNIT
    v += tl.cast(k_start, tl.int64) * stride_vn * UNIT
    first_lse = (tl.cast(batch_row, tl.int64) * num_heads + h) * lse_rows + q_start

    offs_m = start_m + tl.arange(0, BLOCK_M)
    seen_lo, _ = seen_keys(used_q, used_k, left, right)
    seeing_lo, seeing_hi = seeing_rows(used_q, used_k, left, right)
    do_i = load_tile(dout, start_m, stride_dom, seeing_lo, seeing_hi, HEAD_DIM_V, BLOCK_M, BLOCK_DV, UNIT, WIDE, True)
    row0 = tl.cast(batch_row, tl.int64) * seqlen_q + q_start
    out += (row0 * num_heads + h) * HEAD_DIM_V
    stride_om = num_heads * HEAD_DIM_V
    delta_i = tl.zeros([BLOCK_M], tl.float32)
    CHUNK: tl.constexpr = min(BLOCK_DV, 64)  # whole rows of both at once would cost the tile loop its registers
    for d in tl.static_range(0, HEAD_DIM_V, CHUNK):
        delta_i += _row_products(
            out + d, dout + d, start_m, stride_om, stride_dom, seeing_lo, seeing_hi, min(HEAD_DIM_V - d, CHUNK),
            BLOCK_M, CHUNK, UNIT, WIDE,
        )  # fmt: skip
    if dlse is not None:
        dlse += tl.cast(batch_row, tl.int64) * stride_dlb + tl.cast(h, tl.int64) * stride_dlh
        delta_i -= tl.load(dlse + (q_start + offs_m).to(tl.int64) * stride_dlm, mask=offs_m < used_q, other=0.0)
    lse_i = tl.load(lse + first_lse + offs_m, mask=offs_m < used_q, other=0.0)
    delta_i = tl.where(lse_i == float("-inf"), 0.0, delta_i)
    tl.store(delta + first_lse + offs_m, delta_i, mask=offs_m < used_q)
    if not NATURAL:
        lse_i = lse_i * LOG2_E
    q_i = load_tile(q, start_m, stride_qm, seeing_lo, seeing_hi, HEAD_DIM, BLOCK_M, BLOCK_D, UNIT, WIDE, True)
    dq_i = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slope_i = tl.zeros([BLOCK_M], tl.float32)
    terms = (
        b, h, q_start, k_start, alibi_slopes,
        (bias, (stride_bm, stride_bn, bias_rows, bias_keys), (bias_aux0, bias_aux1, bias_aux2, bias_aux3)),
        (mask, (stride_mm, stride_mn, mask_rows, mask_keys), (mask_aux0, mask_aux1, mask_aux2, mask_aux3)),
        dropout_seed, threshold,
        start_terms(
            b, h, batch, alibi_slopes, stride_ab, bias, stride_bb, stride_bh, mask, stride_mb, stride_mh, dropout_seed,
            NATURAL
        ),
    )  # fmt: skip
    scale = softmax_scale if SOFTCAP or NATURAL else softmax_scale * LOG2_E

    lo, hi = key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
    full_lo, full_hi = full_key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
    lo = lo // BLOCK_N * BLOCK_N
    full_lo = tl.minimum(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, tl.cdiv(hi, BLOCK_N) * BLOCK_N)
    full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)
    ALONE: tl.constexpr = not (HAS_LEFT or HAS_RIGHT or TAIL)
    for part in tl.static_range(3):  # as in the forward
        if part == 1 or (part == 0 and HAS_LEFT) or (part == 2 and (HAS_RIGHT or TAIL)):
            start = lo if part == 0 else (full_lo if part == 1 else full_hi)
            end = full_lo if part == 0 else (full_hi if part == 1 else hi)
            for _ in range(1 if ALONE else once(start, end)):
                dq_i, slope_i = _accumulate_dq(
                    dq_i, slope_i, q_i, do_i, lse_i, delta_i, k, v, stride_kn, stride_vn, start, end, offs_m, used_q,
                    used_k, seen_lo, left, right, scale, softcap, terms, keep_scale, HEAD_DIM, HEAD_DIM_V, SOFTCAP,
                    HAS_LEFT, HAS_RIGHT, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES, NATURAL, HIDES, DROPOUT,
                    dslopes is not None, PRECISION, BLOCK_N, BLOCK_D, BLOCK_DV, UNIT, WIDE, part != 1,
                )  # fmt: skip

    sees = (offs_m >= seeing_lo) & (offs_m < seeing_hi)
    if HIDES:
        sees = sees & (lse_i > float("-inf"))
    if dslopes is not None:
        tl.store(dslopes + first_lse + offs_m, tl.where(sees, slope_i, 0.0), mask=offs_m < q_rows)
    if dq is not None:
        dq += (row0 * num_heads + h) * HEAD_DIM
        dq_i = tl.where(sees[:, None], dq_i * softmax_scale, 0.0)
        store_tile(dq, start_m, num_heads * HEAD_DIM, q_rows, dq_i, HEAD_DIM, BLOCK_M, BLOCK_D, WIDE)
