"""FlashAttention-3 backward in Gluon, for Hopper (sm_90): dQ, dK and dV in one pass over the scores.

A program is persistent: it takes tiles of BLOCK_N = 128 keys of one (sequence, K/V head) from a counter in global
memory, those with the most rows first. One warp, the producer, fetches the tile's K and V once, and Q, dO, lse and
delta block by block into rings of NST stages. Two warpgroups consume, 64 keys each, all transposed: keys along the
first axis. For each block of BLOCK_M rows a consumer computes, from operands in shared memory unless said otherwise,

    S^T  = K Q^T            P^T  = exp2(S^T - lse)
    dP^T = V dO^T           dS^T = P^T * (dP^T - delta)
    dV  += P^T dO                                        (P^T in registers)
    dK  += dS^T Q                                        (dS^T in registers)
    dQ   = dS K                                          (dS of both warpgroups; each makes half of dQ)

dQ of a block is made beside S of the next, so that the warpgroups need not wait for each other's dS. dK and dV stay in
registers, summed over the query heads of the group. dQ is added to an fp32 sum in global memory, from registers or
(BULK) from shared memory by the copy engine, so the order of its additions varies from run to run. A kernel before
(preprocess.py) computes delta; one after scales and converts dQ. With START, S starts at -lse and dP at -delta.

Only blocks that hold a hidden pair are masked, and come first. Scores are in log2 units. Shapes as in forward.py; rows
past a sequence are the neighbour's, so Q, dO and K rows that take no part are zeroed in shared memory (0 * NaN is NaN).

Source: Shah et al., "FlashAttention-3" (2024), section 3 and appendix B.1; Dao, "FlashAttention-2" (2023), algorithm 2.
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

from ..fa2.common import LOG2_E, UNLIMITED, seeing_rows, seen_keys, softcap_gradient
from .common import (
    FACTS,
    barrier,
    clear_rows,
    fact,
    halves,
    join_halves,
    mask_transposed,
    pack,
    query_block,
    query_blocks,
    receive,
    release,
    score,
    store_tile,
    store_zeros,
    unpack,
)
from .producer import query_producer
from .versions import reinterpret, tma_add

# Hardware barriers: 5 and 6 guard Q, 12 and 13 dO; 8 to 11 say, by parity of a block, that dS of a warpgroup is there.


@gluon.jit
def _step(
    dk, dv, k_s, v_s, ring, sums, ds_s, ds_full, it, before, place, lengths, left, right, scale, softcap,
    WG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, NSTO: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr, CLEAR: gl.constexpr, FIRST: gl.constexpr, NEED_DQ: gl.constexpr,
    NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, NAMED: gl.constexpr, START: gl.constexpr, BULK: gl.constexpr,
    APART: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One block of rows, and dQ of the block before, whose sum is at before, unless FIRST. No product is in flight
    before or after."""
    q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty = ring
    start_m = place[0]
    seeing_lo, seeing_hi = lengths[2], lengths[3]
    dtype: gl.constexpr = q_s.dtype
    NEED_DS: gl.constexpr = NEED_DQ or NEED_DK
    DQ_BEFORE: gl.constexpr = NEED_DQ and not FIRST
    HALF: gl.constexpr = BLOCK_M // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    k_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16]), 2)
    v_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16]), 2)
    stage, stage_do = it % NST, it % NSTO
    phase, phase_do = (it // NST) & 1, (it // NSTO) & 1
    # K and V are where they always are, but ptxas keeps what it knows not to change in registers that are not there.
    always = it >> 30
    if APART:
        k_rows = k_s.index(WG + always).reshape([64, BLOCK_D])
    else:
        k_tile = k_s.index(always).reshape([BLOCK_N, BLOCK_D])
        k_rows = k_tile.slice(WG * 64, 64, 0)
    q = q_s.index(stage).reshape([BLOCK_M, BLOCK_D])
    do = do_s.index(stage_do).reshape([BLOCK_M, BLOCK_DV])
    zeros = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    if DQ_BEFORE:
        _await_scores(ds_full, it - 1, WG, NAMED)
        dq_token = _issue_dq(ds_s, k_tile, it - 1, WG, BLOCK_M, BLOCK_D)
    mbarrier.wait(q_full.index(stage), phase)
    s_start = _start(lse_s.index(stage), s_layout, BLOCK_M) if START else zeros
    s_token = warpgroup_mma(k_rows, q.permute((1, 0)), s_start, use_acc=START, is_async=True)
    if DQ_BEFORE:
        _add_dq(sums, before, warpgroup_mma_wait(1, deps=[dq_token]), WG, BULK, RAGGED)
    if START and FIRST:  # ptxas makes it wait in any case, and says so
        s_token = warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.wait(do_full.index(stage_do), phase_do)
    if CLEAR:  # hidden scores may come from anything; sums over rows may not
        if (start_m < seeing_lo) | (start_m + BLOCK_M > seeing_hi):
            clear_rows(q, seeing_lo - start_m, seeing_hi - start_m, BLOCK_M, BLOCK_D)
            clear_rows(do, seeing_lo - start_m, seeing_hi - start_m, BLOCK_M, BLOCK_DV)
    if NEED_DS:
        dp_start = _start(delta_s.index(stage_do), s_layout, BLOCK_M) if START else zeros
        if APART:
            v_rows = v_s.index(WG + always).reshape([64, BLOCK_DV])
        else:
            v_rows = v_s.index(always).reshape([BLOCK_N, BLOCK_DV]).slice(WG * 64, 64, 0)
        dp_token = warpgroup_mma(v_rows, do.permute((1, 0)), dp_start, use_acc=START, is_async=True)
    s = warpgroup_mma_wait(1 if NEED_DS else 0, deps=[s_token])
    # The two halves of the rows one after the other: products of the first beside exponentials of the second.
    s_near, s_far = halves(s, BLOCK_M)
    near, near_factor = _weights(s_near, lse_s.index(stage).slice(0, HALF), place, lengths, left, right, scale, softcap,
                                 HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, HALF, 0, START)  # fmt: skip
    if NEED_DV:
        near16 = unpack(pack(near, dtype, HALF), dtype, v_layout, HALF)
        dv_token = warpgroup_mma(near16, do.slice(0, HALF, 0), dv, is_async=True)
    if NEED_DS:
        mbarrier.wait(do_full.index(stage_do), phase_do)  # has been; but it keeps ptxas from waiting for dP before exp2
        dp, near = warpgroup_mma_wait(1 if NEED_DV else 0, deps=[dp_token, near])
        dp_near, dp_far = halves(dp, BLOCK_M)
        delta = delta_s.index(stage_do)
        near_pairs = _score_gradients(near, dp_near, near_factor, delta.slice(0, HALF), place, lengths, left, right,
                                      dtype, HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, HALF, 0, START)  # fmt: skip
    far, far_factor = _weights(s_far, lse_s.index(stage).slice(HALF, HALF), place, lengths, left, right, scale, softcap,
                               HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, HALF, 1, START)  # fmt: skip
    if NEED_DV:
        far16 = unpack(pack(far, dtype, HALF), dtype, v_layout, HALF)
        dv_token = warpgroup_mma(far16, do.slice(HALF, HALF, 0), dv_token, is_async=True)
    if NEED_DS:
        far_pairs = _score_gradients(far, dp_far, far_factor, delta.slice(HALF, HALF), place, lengths, left, right,
                                     dtype, HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKED, HALF, 1, START)  # fmt: skip
    if not NEED_DV:
        release(do_empty, stage_do, 12, 2, NAMED)
    if NEED_DQ:
        half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        near_ds = unpack(near_pairs, dtype, half_layout, HALF)
        far_ds = unpack(far_pairs, dtype, half_layout, HALF)
        ds_s.index(it & 1).slice(WG * 64, 64, 0).store(join_halves(near_ds, far_ds, s_layout, BLOCK_M))
        fence_async_shared()
        _announce_scores(ds_full, it, WG, NAMED)
    if NEED_DK:
        near_ds16 = unpack(near_pairs, dtype, k_layout, HALF)
        far_ds16 = unpack(far_pairs, dtype, k_layout, HALF)
        dk_token = warpgroup_mma(near_ds16, q.slice(0, HALF, 0), dk, is_async=True)
        dk_token = warpgroup_mma(far_ds16, q.slice(HALF, HALF, 0), dk_token, is_async=True)
    if NEED_DV:
        dv, near16, far16 = warpgroup_mma_wait(2 if NEED_DK else 0, deps=[dv_token, near16, far16])
        release(do_empty, stage_do, 12, 2, NAMED)
    if NEED_DK:
        dk, near_ds16, far_ds16 = warpgroup_mma_wait(0, deps=[dk_token, near_ds16, far_ds16])
    release(q_empty, stage, 5, 2, NAMED)
    return dk, dv


@gluon.jit
def _by_row(values, HALF: gl.constexpr):
    """lse or delta of rows, for the columns of scores that a thread holds. preprocess.py has put together what it
    needs: 16 a + 8 b + 2 c + d is at 16 a + 4 c + 2 b + d."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [16]] if HALF == 32 else [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [HALF]
    )
    x = gl.permute(gl.reshape(values.load(layout), [HALF // 16, 4, 2, 2]), (0, 2, 1, 3))
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    x = gl.convert_layout(gl.reshape(x, [HALF]), gl.SliceLayout(0, s_layout), assert_trivial=True)
    return gl.expand_dims(x, 0)


@gluon.jit
def _start(values, layout: gl.constexpr, BLOCK_M: gl.constexpr):
    """What an accumulator of 64 keys starts at: the same for all of them."""
    start, _zeros = gl.broadcast(_by_row(values, BLOCK_M), gl.zeros([64, BLOCK_M], gl.float32, layout))
    return start


@gluon.jit
def _weights(s, lse, place, lengths, left, right, scale, softcap, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
             SOFTCAP: gl.constexpr, MASKED: gl.constexpr, HALF: gl.constexpr, NTH: gl.constexpr,
             START: gl.constexpr):  # fmt: skip
    """exp(s - lse) of half a block, and what softcap multiplies gradients by."""
    start_m, key = place
    used_q, used_k = lengths[0], lengths[1]
    factor = s
    if SOFTCAP:
        s = score(s, scale, softcap, True, False)
        factor = softcap_gradient(s, softcap)
        s = s - _by_row(lse, HALF)
    elif START:
        s = s * scale
    else:
        s = s * scale - _by_row(lse, HALF)
    if MASKED:
        start_m += NTH * HALF
        s = mask_transposed(s, float("-inf"), key, start_m, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, HALF)
    return gl.exp2(s), factor


@gluon.jit
def _score_gradients(p, dp, factor, delta, place, lengths, left, right, dtype: gl.constexpr, HAS_LEFT: gl.constexpr,
                     HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr, HALF: gl.constexpr,
                     NTH: gl.constexpr, START: gl.constexpr):  # fmt: skip
    """dS of half a block, packed."""
    start_m, key = place
    used_q, used_k = lengths[0], lengths[1]
    ds = p * (dp if START else dp - _by_row(delta, HALF))
    if SOFTCAP:
        ds = ds * factor
    if MASKED:
        start_m += NTH * HALF
        ds = mask_transposed(ds, 0.0, key, start_m, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, HALF)
    return pack(ds, dtype, HALF)


@gluon.jit
def _announce_scores(ds_full, n, WG: gl.constexpr, NAMED: gl.constexpr):
    """This warpgroup's half of dS of block n is in shared memory."""
    if NAMED:
        barrier("bar.arrive $1, 256; mov.b32 $0, $1;", 8 + 2 * (n & 1) + WG)
    else:
        mbarrier.arrive(ds_full.index(2 * (n & 1) + WG), count=1)


@gluon.jit
def _await_scores(ds_full, n, WG: gl.constexpr, NAMED: gl.constexpr):
    """The other's half is there, too."""
    if NAMED:
        barrier("bar.sync $1, 256; mov.b32 $0, $1;", 8 + 2 * (n & 1) + 1 - WG)
    else:
        mbarrier.wait(ds_full.index(2 * (n & 1) + 1 - WG), (n >> 1) & 1)


@gluon.jit
def _issue_dq(ds_s, k_tile, n, WG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """This warpgroup's half of dQ of block n: half the rows, or of 64 rows half the columns."""
    WIDTH: gl.constexpr = BLOCK_D // 2 if BLOCK_M == 64 else BLOCK_D
    if BLOCK_M == 64:
        ds = ds_s.index(n & 1).permute((1, 0))
        k_d = k_tile.slice(WG * WIDTH, WIDTH, 1)
    else:
        ds = ds_s.index(n & 1).slice(WG * 64, 64, 1).permute((1, 0))
        k_d = k_tile
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return warpgroup_mma(ds, k_d, gl.zeros([64, WIDTH], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _add_dq(sums, where, dq, WG: gl.constexpr, BULK: gl.constexpr, RAGGED: gl.constexpr):
    """Add this warpgroup's half of dQ to its place in the sum."""
    dq_sum, dq_s = sums
    WIDTH: gl.constexpr = dq.shape[1]
    if BULK:
        batch_row, row, h, rows_left = where
        if RAGGED:
            if rows_left < 64:  # 0 * NaN must not reach the next sequence
                inside = gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout)) < rows_left
                dq = gl.where(gl.expand_dims(inside, 1), dq, 0.0)
        staged = dq_s.index(WG)
        tma.store_wait(0)
        staged.reshape([64, WIDTH]).store(dq)
        fence_async_shared()
        tma_add(dq_sum, [batch_row, row, h, WG * WIDTH], staged)
    else:
        _add_dq_of_threads(dq_sum + where, dq, WG)


@gluon.jit
def _add_dq_of_threads(block, dq, WG: gl.constexpr):
    """By fours, in the order in which the threads hold it (preprocess.py)."""
    WIDTH: gl.constexpr = dq.shape[1]
    rows = gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, dq.type.layout))
    rows = rows // 16 * 128 + rows % 8 * 16 + rows // 8 % 2 * 2
    columns = columns // 8 * 512 + columns % 8 // 2 * 4 + columns % 2
    to = (block + WG * (64 * WIDTH) + (gl.expand_dims(rows, 1) + gl.expand_dims(columns, 0))).to(gl.int64)
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [to, dq], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _consumer(
    shared, WG: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, NSTO: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, MASKS: gl.constexpr, CLEAR: gl.constexpr, RAGGED: gl.constexpr,
    SOFTCAP: gl.constexpr, NEED_DQ: gl.constexpr, NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, NAMED: gl.constexpr,
    START: gl.constexpr, BULK: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    outputs, keys, ring, notes, sums, ds_s, ds_full, sizes, left, right, scale, softcap, softmax_scale = shared
    dk, dv = outputs[2], outputs[3]
    k_s, v_s, kv_full, kv_empty = keys
    group_size, num_heads_kv, seqlen_q, seqlen_k = sizes
    num_heads = num_heads_kv * group_size
    facts_empty = notes[2]
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    it = 0
    tiles_before = 0
    keys_before = 0
    while receive(notes, tiles_before) > 0:
        start_n = fact(notes, tiles_before, 1)
        used_q = fact(notes, tiles_before, 2) if RAGGED else seqlen_q
        used_k = fact(notes, tiles_before, 3) if RAGGED else seqlen_k
        hk = fact(notes, tiles_before, 7)
        first, count, low, high, turn = query_blocks(start_n, used_q, used_k, left, right, BLOCK_M, BLOCK_N)
        seeing_lo, seeing_hi = seeing_rows(used_q, used_k, left, right)
        lengths = (used_q, used_k, seeing_lo, seeing_hi)
        key = start_n + WG * 64
        dk_i = gl.zeros([64, BLOCK_D], gl.float32, dk_layout)
        dv_i = gl.zeros([64, BLOCK_DV], gl.float32, dv_layout)
        if count > 0:
            mbarrier.wait(kv_full, keys_before & 1)
            if CLEAR and NEED_DQ:
                seen_lo, seen_hi = seen_keys(used_q, used_k, left, right)
                if (start_n < seen_lo) | (start_n + BLOCK_N > seen_hi):
                    k_tile = k_s.index(0).reshape([BLOCK_N, BLOCK_D])
                    clear_rows(k_tile, seen_lo - start_n, seen_hi - start_n, BLOCK_N, BLOCK_D)
            if BULK:
                q_start = fact(notes, tiles_before, 4) if RAGGED else 0
                origin = (fact(notes, tiles_before, 6), q_start + first * BLOCK_M, used_q - first * BLOCK_M)
            else:
                origin = fact(notes, tiles_before, 9) + first
            before = _dq_place(origin, 0, num_heads, 0, BLOCK_M, BLOCK_D, BULK)
            if NEED_DQ:  # the first block, which has none before it
                block = query_block(0, count, low, high, turn)
                place = ((first + block) * BLOCK_M, key)
                dk_i, dv_i = _step(
                    dk_i, dv_i, k_s, v_s, ring, sums, ds_s, ds_full, it, before, place, lengths, left, right, scale,
                    softcap, WG, BLOCK_M, BLOCK_N, NST, NSTO, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, MASKS,
                    CLEAR, True, NEED_DQ, NEED_DK, NEED_DV, NAMED, START, BULK, APART, RAGGED,
                )  # fmt: skip
                before = _dq_place(origin, block, num_heads, hk * group_size, BLOCK_M, BLOCK_D, BULK)
                it += 1
            for member in range(group_size):
                done = gl.maximum(1 - member, 0) if NEED_DQ else 0
                h = hk * group_size + member
                if MASKS:
                    for n in range(done, low + high):
                        block = query_block(n, count, low, high, turn)
                        place = ((first + block) * BLOCK_M, key)
                        dk_i, dv_i = _step(
                            dk_i, dv_i, k_s, v_s, ring, sums, ds_s, ds_full, it, before, place, lengths, left, right,
                            scale, softcap, WG, BLOCK_M, BLOCK_N, NST, NSTO, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                            SOFTCAP, True, CLEAR, False, NEED_DQ, NEED_DK, NEED_DV, NAMED, START, BULK, APART, RAGGED,
                        )  # fmt: skip
                        before = _dq_place(origin, block, num_heads, h, BLOCK_M, BLOCK_D, BULK)
                        it += 1
                for n in range(gl.maximum(low + high, done), count):
                    dk_i, dv_i = _step(
                        dk_i, dv_i, k_s, v_s, ring, sums, ds_s, ds_full, it, before, (0, 0), lengths, left, right,
                        scale, softcap, WG, BLOCK_M, BLOCK_N, NST, NSTO, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                        SOFTCAP, False, False, False, NEED_DQ, NEED_DK, NEED_DV, NAMED, START, BULK, APART, RAGGED,
                    )  # fmt: skip
                    block = query_block(n, count, low, high, turn)
                    before = _dq_place(origin, block, num_heads, h, BLOCK_M, BLOCK_D, BULK)
                    it += 1
            if NEED_DQ:
                _await_scores(ds_full, it - 1, WG, NAMED)
                dq_token = _issue_dq(ds_s, k_s.index(0).reshape([BLOCK_N, BLOCK_D]), it - 1, WG, BLOCK_M, BLOCK_D)
                _add_dq(sums, before, warpgroup_mma_wait(0, deps=[dq_token]), WG, BULK, RAGGED)
            if not APART:
                mbarrier.arrive(kv_empty, count=1)
            keys_before += 1
        batch_row = fact(notes, tiles_before, 6)
        k_start = fact(notes, tiles_before, 5) if RAGGED else 0
        rows_left = (fact(notes, tiles_before, 8) if RAGGED else seqlen_k) - key
        place_of_keys = (batch_row, k_start + key, hk, rows_left, num_heads_kv, seqlen_k)
        if APART:
            if count > 0:
                _store_gradients(dk_i * softmax_scale, dv_i, outputs, place_of_keys, WG, HEAD_DIM, HEAD_DIM_V, RAGGED,
                                 NEED_DK, NEED_DV, False)  # fmt: skip
                tma.store_wait(0)
                mbarrier.arrive(kv_empty, count=1)
            else:  # and in K's place the next tile's may be
                first_row = (batch_row.to(gl.int64) * seqlen_k + k_start + key) * num_heads_kv + hk
                if NEED_DK:
                    store_zeros(dk + first_row * HEAD_DIM, num_heads_kv * HEAD_DIM, rows_left, HEAD_DIM, BLOCK_D)
                if NEED_DV:
                    store_zeros(dv + first_row * HEAD_DIM_V, num_heads_kv * HEAD_DIM_V, rows_left, HEAD_DIM_V, BLOCK_DV)
        else:
            _store_gradients(dk_i * softmax_scale, dv_i, outputs, place_of_keys, WG, HEAD_DIM, HEAD_DIM_V, RAGGED,
                             NEED_DK, NEED_DV, NEED_DQ and BULK)  # fmt: skip
        mbarrier.arrive(facts_empty.index(tiles_before & 1), count=1)
        tiles_before += 1
    tma.store_wait(0)


@gluon.jit
def _dq_place(origin, block, num_heads, h, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, BULK: gl.constexpr):
    """Where dQ of a block of rows goes. origin: batch entry and row of the first block, and the sequence's rows from
    there on; without BULK its number among the tiles of BLOCK_M rows of all sequences, by which the sum is ordered,
    then by head."""
    if BULK:
        batch_row, row, rows = origin
        return batch_row, row + block * BLOCK_M, h, rows - block * BLOCK_M
    else:
        return ((origin + block) * num_heads + h).to(gl.int64) * (BLOCK_M * BLOCK_D)


@gluon.jit
def _store_gradients(
    dk_i, dv_i, outputs, place_of_keys, WG: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    RAGGED: gl.constexpr, NEED_DK: gl.constexpr, NEED_DV: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """IN_TURN: both go through the same shared memory."""
    dk_tiles, dv_tiles, dk, dv, dk_s, dv_s = outputs
    batch_row, row, hk, rows_left, num_heads_kv, seqlen_k = place_of_keys
    tma.store_wait(0)  # those of the tile before
    if NEED_DK:
        store_tile(dk_i, dk_tiles, dk, dk_s.index(WG), batch_row, row, hk, rows_left, num_heads_kv, seqlen_k, HEAD_DIM,
                   RAGGED)  # fmt: skip
    if NEED_DV:
        if IN_TURN:
            tma.store_wait(0)
        store_tile(dv_i, dv_tiles, dv, dv_s.index(WG), batch_row, row, hk, rows_left, num_heads_kv, seqlen_k,
                   HEAD_DIM_V, RAGGED)  # fmt: skip


@gluon.jit
def _staging(tiles, dq_s, BLOCK: gl.constexpr, SHARED: gl.constexpr):
    """Shared memory through which dK or dV of both warpgroups goes: dQ's, or its own."""
    if SHARED:
        return reinterpret(dq_s, tiles.dtype, [2, 1, 64, 1, BLOCK], tiles.layout)
    else:
        return gl.allocate_shared_memory(tiles.dtype, [2, 1, 64, 1, BLOCK], tiles.layout)


@gluon.jit(
    do_not_specialize=[
        "batch", "num_heads", "group_size", "seqlen_q", "seqlen_k", "num_tiles", "heads_together", "window_left",
        "window_right",
    ]
)  # fmt: skip
def _attn_bwd_kernel(
    q, k, v, dout, lse_delta, dq_sum, dk_tiles, dv_tiles, dk, dv, counter, cu_seqlens_q, cu_seqlens_k, seqused_q,
    seqused_k,
    batch, num_heads, group_size, seqlen_q, seqlen_k, num_tiles, heads_together, window_left, window_right,
    softmax_scale, softcap,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, MASKS: gl.constexpr, CLEAR: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, NAMED: gl.constexpr, START: gl.constexpr,
    NSTO: gl.constexpr, BULK: gl.constexpr, APART: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, H, Dv), dk_tiles and dv_tiles as TMA
    descriptors, as is lse_delta. Packed: B = 1. That and dq_sum, fp32, are in the orders of preprocess.py;
    with BULK dq_sum is as q, and a TMA descriptor.
    Without dq_sum, dk or dv that gradient is left out."""
    RAGGED: gl.constexpr = cu_seqlens_q is not None or seqused_q is not None or seqused_k is not None
    NEED_DQ: gl.constexpr = dq_sum is not None
    NEED_DK: gl.constexpr = dk is not None
    NEED_DV: gl.constexpr = dv is not None
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [NST, 1, BLOCK_M, 1, BLOCK_D], q.layout)
    do_s = gl.allocate_shared_memory(dtype, [NSTO, 1, BLOCK_M, 1, BLOCK_DV], dout.layout)
    PARTS: gl.constexpr = 2 if APART else 1
    k_s = gl.allocate_shared_memory(dtype, [PARTS, 1, BLOCK_N // PARTS, 1, BLOCK_D], k.layout)
    v_s = k_s
    if NEED_DQ or NEED_DK:
        v_s = gl.allocate_shared_memory(dtype, [PARTS, 1, BLOCK_N // PARTS, 1, BLOCK_DV], v.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [NST, BLOCK_M], lse_delta.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [NSTO, BLOCK_M], lse_delta.layout)
    if NEED_DQ:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        ds_s = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    else:
        ds_s = lse_s
    dq_s, dk_s, dv_s = lse_s, lse_s, lse_s
    IN_TURN: gl.constexpr = NEED_DQ and BULK  # there is no shared memory for more
    if IN_TURN:
        dq_s = gl.allocate_shared_memory(gl.float32, [2, 1, 64, 1, BLOCK_D // 2], dq_sum.layout)
    if NEED_DK:
        dk_s = k_s
        if not APART:
            dk_s = _staging(dk_tiles, dq_s, BLOCK_D, IN_TURN)
    if NEED_DV:
        dv_s = k_s
        if not APART or BLOCK_DV != BLOCK_D:
            dv_s = _staging(dv_tiles, dq_s, BLOCK_DV, IN_TURN and BLOCK_DV == BLOCK_D)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [NSTO, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [NSTO, 1], mbarrier.MBarrierLayout())
    facts = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    facts_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    facts_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(facts_full.index(i), count=1)
        mbarrier.init(facts_empty.index(i), count=2)
    for i in gl.static_range(4):
        mbarrier.init(ds_full.index(i), count=1)
    for i in gl.static_range(NST):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(NSTO):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    fence_async_shared()

    left = window_left if HAS_LEFT else UNLIMITED
    right = window_right if HAS_RIGHT else UNLIMITED
    scale = softmax_scale if SOFTCAP else softmax_scale * LOG2_E
    outputs = (dk_tiles, dv_tiles, dk, dv, dk_s, dv_s)
    keys = (k_s, v_s, kv_full, kv_empty)
    ring = (q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty)
    notes = (facts, facts_full, facts_empty)
    sides = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    sums = (dq_sum, dq_s)
    sizes = (group_size, num_heads // group_size, seqlen_q, seqlen_k)
    shared = (outputs, keys, ring, notes, sums, ds_s, ds_full, sizes, left, right, scale, softcap, softmax_scale)
    gl.warp_specialize(
        [
            (_consumer, (shared, 0, BLOCK_M, BLOCK_N, NST, NSTO, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT,
                         HAS_RIGHT, MASKS, CLEAR, RAGGED, SOFTCAP, NEED_DQ, NEED_DK, NEED_DV, NAMED, START, BULK,
                         APART)),
            (_consumer, (shared, 1, BLOCK_M, BLOCK_N, NST, NSTO, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT,
                         HAS_RIGHT, MASKS, CLEAR, RAGGED, SOFTCAP, NEED_DQ, NEED_DK, NEED_DV, NAMED, START, BULK,
                         APART)),
            (query_producer, (q, k, v, dout, lse_delta, keys, ring, notes, counter, sides, batch, num_heads,
                              group_size, seqlen_q, seqlen_k, num_tiles, heads_together, left, right, BLOCK_M, BLOCK_N,
                              NST, NSTO, NEED_DQ or NEED_DK, APART, NAMED)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
