"""FlashAttention-2 forward: one program per block of query rows.

For each block of rows Q_i, over the key blocks j that it can see:

    S = scale * Q_i K_j^T                          m' = max(m, rowmax S)
    P = exp(S - m')                                l  = exp(m - m') l + rowsum P
    O = exp(m - m') O + P V_j                      m  = m'

and at the end O / l, lse = m + log l: the division is done once, not per block. Key blocks that no row of Q_i sees are
skipped; only the blocks in which some pair is hidden pay for a mask. Rows that see nothing end with l = 0 and get
out 0, lse -inf.

Shapes: q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, H, Dv), lse (B, H, Sq); varlen without B.
Source: Dao, "FlashAttention-2" (2023), section 3.1, algorithm 1, and section 3.2 for the parallelism over rows.
"""

import triton
import triton.language as tl

from .common import (
    LN_2,
    LOG2_E,
    UNLIMITED,
    full_key_range,
    key_range,
    load_tile,
    locate_tile,
    once,
    other_side,
    score,
    seen_keys,
    store_tile,
    used_length,
    visible,
)
from .terms import kept, start_terms, take_part, weights, with_terms


@triton.jit
def _attend(acc, l_i, m_i, q, k, v, stride_kn, stride_vn, start, end, offs_m, seqlen_q, seqlen_k, seen_lo, left, right,
            scale, softcap, terms, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, SOFTCAP: tl.constexpr,
            SCALE_FIRST: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BIAS_FN: tl.constexpr,
            BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr, NATURAL: tl.constexpr,
            HIDES: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Fold the key blocks of [start, end) into (acc, l_i, m_i)."""
    for n in tl.range(start, end, BLOCK_N):
        # Keys that no row sees load as zeros: a NaN there would survive the product with a weight of 0.
        k_j = load_tile(k, n, stride_kn, seen_lo, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, UNIT, WIDE, MASKED)
        s = tl.dot(q, tl.trans(k_j), input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        if SCALE_FIRST:
            s = score(s, scale, softcap, SOFTCAP, NATURAL)
            s = with_terms(
                s, offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, terms, BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES
            )  # fmt: skip
        if MASKED:
            ok = visible(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(ok, s, float("-inf"))
        if SCALE_FIRST:
            m_new = tl.maximum(m_i, tl.max(s, 1))
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        m_safe = m_new
        if MASKED or HIDES:
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key yet: exp2(-inf - 0) = 0, not NaN
        if SCALE_FIRST:
            p = weights(s, m_safe[:, None], NATURAL)
        else:
            p = tl.exp2(s * scale - m_safe[:, None])
        alpha = weights(m_i, m_safe, NATURAL)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_j = load_tile(v, n, stride_vn, seen_lo, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, UNIT, WIDE, MASKED)
        if HIDES:
            v_j = take_part(v_j, s)
        p = kept(p, offs_m[:, None], offs_n[None, :], terms)
        acc = tl.dot(p.to(v_j.dtype), v_j, acc, input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


# Lengths and counts vary from call to call: one compilation serves them all. Strides stay specialised, as their
# divisibility by 16 is what lets loads be vectorised.
SIZES = [
    "batch", "num_heads", "group_size", "seqlen_q", "seqlen_k", "heads_together", "window_left", "window_right",
    "bias_rows", "bias_keys", "mask_rows", "mask_keys", "threshold",
]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, bias, mask, sink, dropout_seed,
    bias_aux0, bias_aux1, bias_aux2, bias_aux3, mask_aux0, mask_aux1, mask_aux2, mask_aux3,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    batch, num_heads, group_size, seqlen_q, seqlen_k, heads_together, window_left, window_right,
    softmax_scale, softcap,
    stride_ab, stride_bb, stride_bh, stride_bm, stride_bn, bias_rows, bias_keys,
    stride_mb, stride_mh, stride_mm, stride_mn, mask_rows, mask_keys, threshold, keep_scale,
    BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr, MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr,
    NATURAL: tl.constexpr, HIDES: tl.constexpr, DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr,
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
        # Heads go through in groups whose K and V fit the L2 cache; within a group the blocks with the most visible
        # keys, the last ones, come first, so that the longest programs do not end up alone.
        num_m = tl.cdiv(seqlen_q, BLOCK_M)
        group = pid // (heads_together * num_m)
        members = tl.minimum(batch * num_heads - group * heads_together, heads_together)
        within = pid - group * (heads_together * num_m)
        block = num_m - 1 - within // members
        bh = group * heads_together + within % members
        b = bh // num_heads
        h = bh % num_heads
        q_start, q_rows, k_start, k_rows = 0, seqlen_q, 0, seqlen_k
    used_q = used_length(seqused_q, b, batch, q_rows)
    used_k = used_length(seqused_k, b, batch, k_rows)

    start_m = block * BLOCK_M
    batch_row = b if cu_seqlens_q is None else 0
    q += tl.cast(batch_row, tl.int64) * stride_qb * UNIT + tl.cast(h, tl.int64) * stride_qh * UNIT
    q += tl.cast(q_start, tl.int64) * stride_qm * UNIT
    k += tl.cast(batch_row, tl.int64) * stride_kb * UNIT + tl.cast(h // group_size, tl.int64) * stride_kh * UNIT
    k += tl.cast(k_start, tl.int64) * stride_kn * UNIT
    v += tl.cast(batch_row, tl.int64) * stride_vb * UNIT + tl.cast(h // group_size, tl.int64) * stride_vh * UNIT
    v += tl.cast(k_start, tl.int64) * stride_vn * UNIT
    stride_om = num_heads * HEAD_DIM_V
    out += (tl.cast(batch_row, tl.int64) * seqlen_q + q_start) * stride_om + h * HEAD_DIM_V
    lse += (tl.cast(batch_row, tl.int64) * num_heads + h) * lse_rows + q_start

    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_i = load_tile(q, start_m, stride_qm, 0, used_q, HEAD_DIM, BLOCK_M, BLOCK_D, UNIT, WIDE, True)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    scale = softmax_scale if SOFTCAP or NATURAL else softmax_scale * LOG2_E
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

    lo, hi = key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
    full_lo, full_hi = full_key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
    seen_lo, _ = seen_keys(used_q, used_k, left, right)
    lo = lo // BLOCK_N * BLOCK_N
    full_lo = tl.minimum(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, tl.cdiv(hi, BLOCK_N) * BLOCK_N)
    full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)
    # The partial blocks at the left edge, the full ones, the partial blocks at the right edge.
    ALONE: tl.constexpr = not (HAS_LEFT or HAS_RIGHT or TAIL)
    for part in tl.static_range(3):
        if part == 1 or (part == 0 and HAS_LEFT) or (part == 2 and (HAS_RIGHT or TAIL)):
            start = lo if part == 0 else (full_lo if part == 1 else full_hi)
            end = full_lo if part == 0 else (full_hi if part == 1 else hi)
            for _ in range(1 if ALONE else once(start, end)):
                acc, l_i, m_i = _attend(
                    acc, l_i, m_i, q_i, k, v, stride_kn, stride_vn, start, end, offs_m, used_q, used_k, seen_lo, left,
                    right, scale, softcap, terms, HEAD_DIM, HEAD_DIM_V, SOFTCAP, SCALE_FIRST, HAS_LEFT, HAS_RIGHT,
                    BIAS_FN, BIAS_AXES, MASK_FN, MASK_AXES, NATURAL, HIDES, DROPOUT, PRECISION, BLOCK_N, BLOCK_D,
                    BLOCK_DV, UNIT, WIDE, part != 1,
                )  # fmt: skip

    # Padding rows computed something from zeros; they count as rows that see nothing.
    padding = offs_m >= used_q
    empty = l_i == 0
    if sink is not None:
        # One more weight, without a value. Where there is no other, lse is the sink, exactly; but not in rows after the
        # last sequence.
        padding = padding | (b >= batch)
        sink_h = tl.load(sink + h).to(tl.float32)
        sink_i = tl.zeros([BLOCK_M], tl.float32) + (sink_h if NATURAL else sink_h * LOG2_E)
        m_new = tl.maximum(m_i, sink_i)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = weights(m_i, m_safe, NATURAL)
        l_i = l_i * alpha + weights(sink_i, m_safe, NATURAL)
        acc = acc * alpha[:, None]
        m_i = m_new
    nothing = (l_i == 0) | padding
    l_safe = tl.where(nothing, 1.0, l_i)
    o_i = tl.where((nothing | empty)[:, None], 0.0, acc / l_safe[:, None])
    if DROPOUT:
        o_i = o_i * keep_scale
    if NATURAL:
        lse_i = m_i + tl.log2(l_safe) * LN_2
    else:
        lse_i = (m_i + tl.log2(l_safe)) * LN_2
    if sink is not None:
        lse_i = tl.where(empty, sink_h, lse_i)
    lse_i = tl.where(nothing, float("-inf"), lse_i)
    store_tile(out, start_m, stride_om, q_rows, o_i, HEAD_DIM_V, BLOCK_M, BLOCK_DV, WIDE)
    tl.store(lse + offs_m, lse_i, mask=offs_m < q_rows)
