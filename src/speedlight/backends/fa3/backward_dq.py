"""dQ of the FlashAttention-3 backward pass by itself, in Gluon, for Hopper (sm_90).

backward.py adds dQ to a sum in global memory, in any order, and has no room for its columns beside dK and dV of head
dimensions above 128. This kernel makes S and dP anew, by tiles of rows, and keeps dQ in registers: the same bits every
time. Tiles, producer and rings are those of forward.py. For each block j of keys a consumer of 64 rows

    issues   dQ += dS_{j-1} K_{j-1}  (dS in registers),  S_j = Q K_j^T,  and dP_j = dO V_j^T when dQ is made
    computes P_j = exp2(S_j - lse), beside dP, and dS_j = P_j * (dP_j - delta)

QREG: Q and dO are operands in registers, so that the products read half as much from shared memory.

Source: Dao, "FlashAttention-2" (2023), algorithm 2, with the loops exchanged; Shah et al., "FlashAttention-3" (2024).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..fa2.common import LOG2_E, UNLIMITED, seen_keys, softcap_gradient
from .common import (
    FACTS,
    HIDDEN,
    clear_rows,
    fact,
    issue_scores,
    key_block,
    key_blocks,
    mask,
    masked_blocks,
    pack,
    place,
    receive,
    release,
    score,
    store_tile,
    store_zeros,
    unpack,
)
from .producer import producer


@gluon.jit
def _step(
    dq, pairs, q, do, k_s, v_s, barriers, it, values, where, lengths, left, right, scale, softcap,
    BLOCK_N: gl.constexpr, NST: gl.constexpr, NSTV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, CLEAR: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
    FIRST: gl.constexpr, NAMED: gl.constexpr, QREG: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """dS of one block of keys, packed, and dQ of the block before, unless FIRST. No product is in flight before or
    after."""
    k_full, k_empty, v_full, v_empty = barriers
    lse2, delta = values
    start_n, row = where
    used_q, used_k, seen_lo, seen_hi = lengths
    dtype: gl.constexpr = k_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    stage, stage_v = it % NST, it % NSTV
    before = (it + NST - 1) % NST
    if not QREG:
        # Where they always are, but ptxas keeps what it knows not to change in registers that are not there.
        q = q.index(WG + (it >> 30)).reshape([64, BLOCK_D])
        do = do.index(WG + (it >> 30)).reshape([64, BLOCK_DV])
    if not FIRST:
        ds16 = unpack(pairs, dtype, p_layout, BLOCK_N)
        dq_token = warpgroup_mma(ds16, k_s.index(before).reshape([BLOCK_N, BLOCK_D]), dq, is_async=True)
    mbarrier.wait(k_full.index(stage), (it // NST) & 1)
    s_token = issue_scores(q, k_s, stage, s_layout, BLOCK_N, BLOCK_D)
    if not FIRST:
        dq, ds16 = warpgroup_mma_wait(1, deps=[dq_token, ds16])
        release(k_empty, before, 5, 2, NAMED)
    mbarrier.wait(v_full.index(stage_v), (it // NSTV) & 1)
    dp_token = issue_scores(do, v_s, stage_v, s_layout, BLOCK_N, BLOCK_DV)
    s = warpgroup_mma_wait(1, deps=[s_token])
    s = score(s, scale, softcap, SOFTCAP, not SOFTCAP)
    factor = s
    if SOFTCAP:
        factor = softcap_gradient(s, softcap)
    if MASKED:
        s = mask(s, HIDDEN, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    p = gl.exp2(s - gl.expand_dims(lse2, 1))
    # Has been; but it keeps ptxas from waiting for dP before exp2.
    mbarrier.wait(v_full.index(stage_v), (it // NSTV) & 1)
    dp, p = warpgroup_mma_wait(0, deps=[dp_token, p])
    release(v_empty, stage_v, 12, 2, NAMED)
    ds = p * (dp - gl.expand_dims(delta, 1))
    if SOFTCAP:
        ds = ds * factor
    if MASKED:
        ds = mask(ds, 0.0, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    if CLEAR:  # K rows that no row of the sequence sees must not take part, whatever they hold
        if (start_n < seen_lo) | (start_n + BLOCK_N > seen_hi):
            k_tile = k_s.index(stage).reshape([BLOCK_N, BLOCK_D])
            clear_rows(k_tile, seen_lo - start_n, seen_hi - start_n, BLOCK_N, BLOCK_D)
    return dq, pack(ds, dtype, BLOCK_N)


@gluon.jit
def _rows_of(lse_delta, first_tile, row, num_heads, h, rows_left, ROWS: gl.constexpr, layout: gl.constexpr):
    """lse and delta of 64 rows of a sequence, from where preprocess.py has put them; inf and 0 past it."""
    i = row + gl.arange(0, 64, layout)
    within = i % ROWS // 16 * 16 + i % 8 // 2 * 4 + i // 8 % 2 * 2 + i % 2
    at = lse_delta + ((first_tile + i // ROWS) * num_heads + h).to(gl.int64) * (2 * ROWS) + within
    inside = gl.arange(0, 64, layout) < rows_left
    return gl.load(at, mask=inside, other=float("inf")), gl.load(at + ROWS, mask=inside, other=0.0)


@gluon.jit
def _consumer(
    shared, WG: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, NSTV: gl.constexpr, ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASKS: gl.constexpr, CLEAR: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr,
    OWN_STAGING: gl.constexpr, NAMED: gl.constexpr, QREG: gl.constexpr,
):  # fmt: skip
    outputs, queries, ring, notes, lse_delta, sizes, left, right, scale, softcap, softmax_scale = shared
    num_heads, seqlen_q, seqlen_k = sizes
    dq_tiles, dq_out, dq_s = outputs
    q_s, do_s, q_full, q_empty = queries
    k_s, v_s, k_full, k_empty, v_full, v_empty = ring
    barriers = (k_full, k_empty, v_full, v_empty)
    facts_empty = notes[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    it = 0
    tiles_before = 0
    queries_before = 0
    while receive(notes, tiles_before) > 0:
        start_m = fact(notes, tiles_before, 1)
        used_q = fact(notes, tiles_before, 2) if RAGGED else seqlen_q
        used_k = fact(notes, tiles_before, 3) if RAGGED else seqlen_k
        q_start, q_rows, b, h = place(notes, tiles_before, seqlen_q, RAGGED)
        first_tile = fact(notes, tiles_before, 9)
        row = start_m + WG * 64
        first, count = key_blocks(start_m, used_q, used_k, left, right, 128, BLOCK_N)
        on_the_right, on_the_left = masked_blocks(
            start_m, first, count, used_q, used_k, left, right, HAS_LEFT, 128, BLOCK_N
        )
        masked = on_the_right + on_the_left if MASKS else 0
        seen_lo, seen_hi = seen_keys(used_q, used_k, left, right)
        lengths = (used_q, used_k, seen_lo, seen_hi)
        if count > 0:
            values = _rows_of(lse_delta, first_tile, row, num_heads, h, q_rows - row, ROWS, row_layout)
            dq = gl.zeros([64, BLOCK_D], gl.float32, dq_layout)
            mbarrier.wait(q_full.index(WG), queries_before & 1)
            q, do = q_s, do_s
            if QREG:
                q = q_s.index(WG).reshape([64, BLOCK_D]).load(gl.DotOperandLayout(0, s_layout, 2))
                do = do_s.index(WG).reshape([64, BLOCK_DV]).load(gl.DotOperandLayout(0, s_layout, 2))
                if OWN_STAGING:
                    mbarrier.arrive(q_empty.index(WG), count=1)
            where = ((first + count - 1) * BLOCK_N, row)
            dq, pairs = _step(
                dq, 0, q, do, k_s, v_s, barriers, it, values, where, lengths, left, right, scale, softcap,
                BLOCK_N, NST, NSTV, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, CLEAR, SOFTCAP, MASKS, True, NAMED, QREG,
                WG,
            )  # fmt: skip
            it += 1
            for n in range(1, masked):
                block = key_block(n, first, count, on_the_right, on_the_left, HAS_LEFT)
                dq, pairs = _step(
                    dq, pairs, q, do, k_s, v_s, barriers, it, values, (block * BLOCK_N, row), lengths,
                    left, right, scale, softcap, BLOCK_N, NST, NSTV, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, CLEAR,
                    SOFTCAP, True, False, NAMED, QREG, WG,
                )  # fmt: skip
                it += 1
            for _ in range(gl.maximum(masked, 1), count):
                dq, pairs = _step(
                    dq, pairs, q, do, k_s, v_s, barriers, it, values, (0, row), lengths, left, right,
                    scale, softcap, BLOCK_N, NST, NSTV, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, False, SOFTCAP, False,
                    False, NAMED, QREG, WG,
                )  # fmt: skip
                it += 1
            if OWN_STAGING and not QREG:
                mbarrier.arrive(q_empty.index(WG), count=1)
            before = (it - 1) % NST
            ds16 = unpack(pairs, k_s.dtype, gl.DotOperandLayout(0, dq_layout, 2), BLOCK_N)
            dq_token = warpgroup_mma(ds16, k_s.index(before).reshape([BLOCK_N, BLOCK_D]), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq_token])
            release(k_empty, before, 5, 2, NAMED)
            sees = gl.convert_layout(values[0], gl.SliceLayout(1, dq_layout)) != float("inf")  # 0 * NaN is NaN
            dq = gl.where(gl.expand_dims(sees, 1), dq * softmax_scale, 0.0)
            if OWN_STAGING:
                tma.store_wait(0)  # those of the tile before
                staging = dq_s.index(WG)
            else:
                staging = q_s.index(WG)
            store_tile(dq, dq_tiles, dq_out, staging, b, q_start + row, h, q_rows - row, num_heads, seqlen_q, HEAD_DIM,
                       RAGGED)  # fmt: skip
            if not OWN_STAGING:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(WG), count=1)
            queries_before += 1
        else:
            first_row = (b.to(gl.int64) * seqlen_q + q_start + row) * num_heads + h
            store_zeros(dq_out + first_row * HEAD_DIM, num_heads * HEAD_DIM, q_rows - row, HEAD_DIM, BLOCK_D)
        mbarrier.arrive(facts_empty.index(tiles_before & 1), count=1)
        tiles_before += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "batch", "num_heads", "group_size", "seqlen_q", "seqlen_k", "num_tiles", "heads_together", "window_left",
        "window_right",
    ]
)  # fmt: skip
def _attn_bwd_dq_kernel(
    q, k, v, dout, lse_delta, dq_tiles, dq, counter, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    batch, num_heads, group_size, seqlen_q, seqlen_k, num_tiles, heads_together, window_left, window_right,
    softmax_scale, softcap,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASKS: gl.constexpr, CLEAR: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
    NST: gl.constexpr, NSTV: gl.constexpr, ROWS: gl.constexpr, OWN_STAGING: gl.constexpr, NAMED: gl.constexpr,
    QREG: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, H, Dv) and dq_tiles, as q, as TMA descriptors;
    dq is the memory of dq_tiles. Packed: B = 1. lse_delta is by tile of ROWS rows, in the order of preprocess.py."""
    RAGGED: gl.constexpr = cu_seqlens_q is not None or seqused_q is not None or seqused_k is not None
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, BLOCK_D], q.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, BLOCK_DV], dout.layout)
    k_s = gl.allocate_shared_memory(dtype, [NST, 1, BLOCK_N, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [NSTV, 1, BLOCK_N, 1, BLOCK_DV], v.layout)
    dq_s = q_s  # where there is no shared memory for more
    if OWN_STAGING:
        dq_s = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, BLOCK_D], dq_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [NSTV, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [NSTV, 1], mbarrier.MBarrierLayout())
    facts = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    facts_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    facts_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(facts_full.index(i), count=1)
        mbarrier.init(facts_empty.index(i), count=2)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(NST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(NSTV):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    left = window_left if HAS_LEFT else UNLIMITED
    right = window_right if HAS_RIGHT else UNLIMITED
    scale = softmax_scale if SOFTCAP else softmax_scale * LOG2_E
    outputs = (dq_tiles, dq, dq_s)
    queries = (q_s, do_s, q_full, q_empty)
    ring = (k_s, v_s, k_full, k_empty, v_full, v_empty)
    notes = (facts, facts_full, facts_empty)
    sides = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    sizes = (num_heads, seqlen_q, seqlen_k)
    shared = (outputs, queries, ring, notes, lse_delta, sizes, left, right, scale, softcap, softmax_scale)
    gl.warp_specialize(
        [
            (_consumer, (shared, 0, BLOCK_N, NST, NSTV, ROWS, HEAD_DIM, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, MASKS,
                         CLEAR, RAGGED, SOFTCAP, OWN_STAGING, NAMED, QREG)),
            (_consumer, (shared, 1, BLOCK_N, NST, NSTV, ROWS, HEAD_DIM, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, MASKS,
                         CLEAR, RAGGED, SOFTCAP, OWN_STAGING, NAMED, QREG)),
            (producer, (q, dout, k, v, queries, ring, notes, counter, sides, batch, num_heads, group_size, seqlen_q,
                        seqlen_k, num_tiles, heads_together, left, right, 2, BLOCK_N, NST, NSTV, ROWS, HAS_LEFT, False,
                        NAMED)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
