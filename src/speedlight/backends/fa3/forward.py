"""FlashAttention-3 forward in Gluon, for Hopper (sm_90).

A program is persistent: it takes tiles of NWG * 64 query rows of one (sequence, head) from a counter in global memory,
the longest first. One warp, the producer, locates the tile and fetches it with TMA: Q once, K and V block by block,
from the last key block to the first, into rings of NST stages, each guarded by barriers. NWG warpgroups consume, 64
rows each. For each block j of keys a consumer

    issues   S_j = Q K_j^T               (WGMMA, asynchronous)
    issues   O += P_{j-1} V_{j-1}
    computes P_j = exp2(S_j - m), l      (beside P V on the tensor cores, and beside the other warpgroups' S)

so that exponentials and matrix products overlap within a warpgroup; PINGPONG lets the warpgroups take turns in issuing.
Only blocks that hold a hidden pair are masked. As in `fa2`, scores are in log2 units, O is divided by l at the end, and
a row that sees no key gets out 0 and lse -inf.

Row maxima (FIRST_MAX). m keeps exponentials in range; softmax is the same whatever it is, and P, l and O have floating
points. So m need not be the maximum of the row: it is that of the masked blocks, or if only the first is masked, of
that one's first columns, and stays. The other blocks, nearly all of a long row, have no maxima, no wait of every
exponential for the last score, and no rescaling of O, a third of the instructions. Where m turns out too low, l says
so: it gets so large that weights or products might overflow. Then the producer sends the tile again, "wary", with a
running maximum over all blocks and O rescaled. Which way a tile goes depends on its own data only, as its result does.

TMA addresses tensors as (batch, row, head, column); packed sequences are one batch entry. It reads zeros past a tensor,
but the neighbour's rows past a sequence: their scores are masked, their V rows zeroed in shared memory (0 * NaN is
NaN), and a tile that ends past its sequence is stored row by row.

Source: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2, algorithms 1 and 2; the row maxima are our own.
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

from ..fa2.common import LN_2, LOG2_E, UNLIMITED, seen_keys
from .common import (
    FACTS,
    HIDDEN,
    LOWEST,
    await_writes,
    blocks_to_first_max,
    clear_rows,
    fact,
    first_max,
    halves,
    hides,
    issue_scores,
    join_halves,
    key_block,
    key_blocks,
    log2,
    mark_failed,
    mask,
    masked_blocks,
    pack,
    pass_turn,
    place,
    receive,
    release,
    rescaled,
    row_max,
    row_sum,
    score,
    store_rows,
    store_zeros,
    unpack,
    wait_turn,
    weights,
)
from .producer import producer
from .versions import tma_store


@gluon.jit
def _consumer(
    shared, WG: gl.constexpr, NWG: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    MASK_FIRST: gl.constexpr, MASK_ALL: gl.constexpr, DIAGONAL: gl.constexpr, FIRST_MAX: gl.constexpr,
    EMPTY_ROWS: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr, SCALE_FIRST: gl.constexpr,
    PINGPONG: gl.constexpr, O_PARTS: gl.constexpr, NAMED: gl.constexpr, QREG: gl.constexpr,
):  # fmt: skip
    outputs, queries, ring, notes, turn, num_heads, seqlen_q, seqlen_k, left, right, scale, softcap = shared
    out, lse = outputs[1], outputs[2]
    q_s, _, q_full, q_empty = queries
    k_s, v_s, k_full, k_empty, v_full, v_empty = ring
    facts_empty, failed = notes[2], notes[3]
    BLOCK_M: gl.constexpr = NWG * 64
    SCALED: gl.constexpr = SOFTCAP or SCALE_FIRST
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    if PINGPONG and NAMED and WG == NWG - 1:
        pass_turn(turn, WG, NWG, NAMED)  # warpgroup 0 goes first
    it = 0
    tiles_before = 0
    queries_before = 0
    while receive(notes, tiles_before) > 0:
        wary = fact(notes, tiles_before, 0) == 2
        start_m = fact(notes, tiles_before, 1)
        used_q = fact(notes, tiles_before, 2) if RAGGED else seqlen_q
        used_k = fact(notes, tiles_before, 3) if RAGGED else seqlen_k
        row = start_m + WG * 64
        first, count = key_blocks(start_m, used_q, used_k, left, right, BLOCK_M, BLOCK_N)
        on_the_right, on_the_left = masked_blocks(
            start_m, first, count, used_q, used_k, left, right, HAS_LEFT, BLOCK_M, BLOCK_N
        )
        # V rows that no row of the sequence sees must not take part, whatever they hold.
        seen_lo, _seen_hi = seen_keys(used_q, used_k, left, right)
        if count > 0:
            with_maxima = count
            if FIRST_MAX:
                if not wary:
                    with_maxima = blocks_to_first_max(
                        row, first, count, used_q, used_k, right, on_the_right, on_the_left, HAS_LEFT, BLOCK_N
                    )
            # A maximum that may be too low must stay to the end: rescaling would hide it.
            whole_max = wary | (with_maxima > 1)
            # The first key block, alone.
            m_i = gl.full([64], LOWEST, gl.float32, row_layout)
            o = gl.zeros([64, BLOCK_DV], gl.float32, o_layout)
            mbarrier.wait(q_full.index(WG), queries_before & 1)
            q = q_s.index(WG).reshape([64, BLOCK_D])
            if QREG:
                q = q.load(gl.DotOperandLayout(0, s_layout, 2))
                mbarrier.arrive(q_empty.index(WG), count=1)
            stage = it % NST
            mbarrier.wait(k_full.index(stage), (it // NST) & 1)
            wait_turn(turn, it, WG, PINGPONG, NAMED)
            s_token = issue_scores(q, k_s, stage, s_layout, BLOCK_N, BLOCK_D)
            if PINGPONG:
                pass_turn(turn, WG, NWG, NAMED)
            s = warpgroup_mma_wait(0, deps=[s_token])
            release(k_empty, stage, 5, NWG, NAMED)
            s = score(s, scale, softcap, SOFTCAP, SCALE_FIRST)
            start_n = (first + count - 1) * BLOCK_N
            if DIAGONAL and WG == 0:  # as many keys as the tile has rows: this warpgroup sees none of the second half
                near, _far = halves(s, BLOCK_N)
                near = mask(near, HIDDEN, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N // 2)
                m_i = first_max(near, m_i, scale, whole_max, SCALED, FIRST_MAX, BLOCK_N // 2)
                p = weights(near, m_i, scale, SCALED)
                p = join_halves(p, gl.zeros_like(p), s_layout, BLOCK_N)
            else:
                if DIAGONAL:
                    near, far = halves(s, BLOCK_N)
                    middle = start_n + BLOCK_N // 2
                    far = mask(far, HIDDEN, middle, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N // 2)
                    s = join_halves(near, far, s_layout, BLOCK_N)
                elif MASK_FIRST:
                    s = mask(s, HIDDEN, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
                m_i = first_max(s, m_i, scale, whole_max, SCALED, FIRST_MAX, BLOCK_N)
                p = weights(s, m_i, scale, SCALED)
            l_i = row_sum(p, BLOCK_N)
            alpha = m_i * 0.0 + 1.0
            pairs = pack(p, dtype, BLOCK_N)
            if RAGGED or HAS_LEFT:
                if (start_n < seen_lo) | (start_n + BLOCK_N > used_k):
                    mbarrier.wait(v_full.index(stage), (it // NST) & 1)
                    v_tile = v_s.index(stage).reshape([BLOCK_N, BLOCK_DV])
                    clear_rows(v_tile, seen_lo - start_n, used_k - start_n, BLOCK_N, BLOCK_DV)
            it += 1
            mbarrier.wait(k_full.index(it % NST), (it // NST) & 1, pred=count > 1)

            for n in range(1, with_maxima):
                start_n = key_block(n, first, count, on_the_right, on_the_left, HAS_LEFT) * BLOCK_N
                stage = it % NST
                before = (it - 1) % NST
                v_tile = v_s.index(before).reshape([BLOCK_N, BLOCK_DV])
                wait_turn(turn, it, WG, PINGPONG, NAMED)
                s_token = issue_scores(q, k_s, stage, s_layout, BLOCK_N, BLOCK_D)
                mbarrier.wait(v_full.index(before), ((it - 1) // NST) & 1)
                # S is on its way. The no-op keeps LLVM from moving the product back to where alpha was made.
                alpha = gl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=f,f", [alpha], dtype=gl.float32, is_pure=False, pack=1
                )
                o = rescaled(o, alpha)
                p16 = unpack(pairs, dtype, p_layout, BLOCK_N)
                o_token = warpgroup_mma(p16, v_tile, o, is_async=True)
                if PINGPONG:
                    pass_turn(turn, WG, NWG, NAMED)
                s = warpgroup_mma_wait(1, deps=[s_token])
                release(k_empty, stage, 5, NWG, NAMED)
                s = score(s, scale, softcap, SOFTCAP, SCALE_FIRST)
                if MASK_ALL:
                    if hides(start_n, row, used_q, used_k, left, right, HAS_LEFT, BLOCK_N):
                        s = mask(s, HIDDEN, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
                m_new = row_max(s, m_i, scale, SCALED)
                alpha = gl.exp2(m_i - m_new)
                p = weights(s, m_new, scale, SCALED)
                m_i = m_new
                l_i = l_i * gl.convert_layout(gl.expand_dims(alpha, 1), l_i.type.layout) + row_sum(p, BLOCK_N)
                # Waiting for the next K here ends the basic block. Without that ptxas moves the wait for P V, which
                # must follow the exponentials, in front of them; p, alpha and l among its operands keep LLVM from it.
                mbarrier.wait(k_full.index((it + 1) % NST), ((it + 1) // NST) & 1, pred=n + 1 < count)
                o, p16, p, alpha, l_i = warpgroup_mma_wait(0, deps=[o_token, p16, p, alpha, l_i])
                release(v_empty, before, 12, NWG, NAMED)
                pairs = pack(p, dtype, BLOCK_N)
                if HAS_LEFT:
                    if start_n < seen_lo:
                        mbarrier.wait(v_full.index(stage), (it // NST) & 1)
                        v_now = v_s.index(stage).reshape([BLOCK_N, BLOCK_DV])
                        clear_rows(v_now, seen_lo - start_n, BLOCK_N, BLOCK_N, BLOCK_DV)
                it += 1

            if with_maxima > 1:
                o = rescaled(o, alpha)
            if FIRST_MAX:  # and from here on m stays
                for n in range(with_maxima, count):
                    stage = it % NST
                    before = (it - 1) % NST
                    wait_turn(turn, it, WG, PINGPONG, NAMED)
                    s_token = issue_scores(q, k_s, stage, s_layout, BLOCK_N, BLOCK_D)
                    mbarrier.wait(v_full.index(before), ((it - 1) // NST) & 1)
                    p16 = unpack(pairs, dtype, p_layout, BLOCK_N)
                    o_token = warpgroup_mma(p16, v_s.index(before).reshape([BLOCK_N, BLOCK_DV]), o, is_async=True)
                    if PINGPONG:
                        pass_turn(turn, WG, NWG, NAMED)
                    s = warpgroup_mma_wait(1, deps=[s_token])
                    release(k_empty, stage, 5, NWG, NAMED)
                    p = weights(score(s, scale, softcap, SOFTCAP, SCALE_FIRST), m_i, scale, SCALED)
                    l_i += row_sum(p, BLOCK_N)
                    mbarrier.wait(k_full.index((it + 1) % NST), ((it + 1) // NST) & 1, pred=n + 1 < count)
                    o, p16, p, l_i = warpgroup_mma_wait(0, deps=[o_token, p16, p, l_i])
                    release(v_empty, before, 12, NWG, NAMED)
                    pairs = pack(p, dtype, BLOCK_N)
                    it += 1

            if not QREG:
                mbarrier.arrive(q_empty.index(WG), count=1)
            before = (it - 1) % NST
            mbarrier.wait(v_full.index(before), ((it - 1) // NST) & 1)
            p16 = unpack(pairs, dtype, p_layout, BLOCK_N)
            o_token = warpgroup_mma(p16, v_s.index(before).reshape([BLOCK_N, BLOCK_DV]), o, is_async=True)
            l_sum = gl.convert_layout(gl.sum(l_i, 1), row_layout)
            o = warpgroup_mma_wait(0, deps=[o_token])
            release(v_empty, before, 12, NWG, NAMED)

            q_start, q_rows, b, h = place(notes, tiles_before, seqlen_q, RAGGED)
            offs_m = row + gl.arange(0, 64, row_layout)
            sees = (l_sum != 0.0) & (offs_m < used_q)
            if FIRST_MAX:
                mark_failed(failed.index((tiles_before & 1) * NWG + WG), sees & (not wary), l_sum, o, dtype)
                if wary:
                    await_writes()
            o = rescaled(o, gl.where(sees, 1.0 / l_sum, 0.0))
            if EMPTY_ROWS:  # 0 * NaN is NaN
                o = gl.where(gl.expand_dims(gl.convert_layout(sees, gl.SliceLayout(1, o_layout)), 1), o, 0.0)
            place_of_rows = (b, q_start, row, h, q_rows)
            if O_PARTS == 2:
                near, far = halves(o, BLOCK_DV)
                _store_columns(near, 0, outputs, place_of_rows, num_heads, seqlen_q, WG, HEAD_DIM_V, RAGGED)
                _store_columns(far, BLOCK_DV // 2, outputs, place_of_rows, num_heads, seqlen_q, WG, HEAD_DIM_V, RAGGED)
            else:
                _store_columns(o, 0, outputs, place_of_rows, num_heads, seqlen_q, WG, HEAD_DIM_V, RAGGED)
            # After the fence, which waits for stores.
            lse_i = gl.where(sees, (m_i + log2(l_sum)) * LN_2, float("-inf"))
            gl.store(lse + (b * num_heads + h).to(gl.int64) * seqlen_q + q_start + offs_m, lse_i, mask=offs_m < q_rows)
            queries_before += 1
        else:
            q_start, q_rows, b, h = place(notes, tiles_before, seqlen_q, RAGGED)
            offs_m = row + gl.arange(0, 64, row_layout)
            hidden = gl.full([64], float("-inf"), gl.float32, row_layout)
            gl.store(lse + (b * num_heads + h).to(gl.int64) * seqlen_q + q_start + offs_m, hidden, mask=offs_m < q_rows)
            first_row = (b.to(gl.int64) * seqlen_q + q_start + row) * num_heads + h
            store_zeros(out + first_row * HEAD_DIM_V, num_heads * HEAD_DIM_V, q_rows - row, HEAD_DIM_V, BLOCK_DV)
        mbarrier.arrive(facts_empty.index(tiles_before & 1), count=1)
        tiles_before += 1
    if PINGPONG and NAMED and WG == 0:
        wait_turn(turn, it, WG, PINGPONG, NAMED)  # the last turn that was passed
    tma.store_wait(0)


@gluon.jit
def _store_columns(o, column: gl.constexpr, outputs, place_of_rows, num_heads, seqlen_q, WG: gl.constexpr,
                   HEAD_DIM_V: gl.constexpr, RAGGED: gl.constexpr):  # fmt: skip
    """Columns of out from the given one on."""
    out_tiles, out, _lse, o_s = outputs
    b, q_start, row, h, q_rows = place_of_rows
    layout: gl.constexpr = o.type.layout
    WIDTH: gl.constexpr = o.shape[1]
    o_tile = o_s.index(WG)
    o_rows = o_tile.reshape([64, WIDTH])
    tma.store_wait(0)
    o_rows.store(unpack(pack(o, o_s.dtype, WIDTH), o_s.dtype, layout, WIDTH))
    fence_async_shared()
    if RAGGED:
        if row + 64 <= q_rows:
            tma_store(out_tiles, [b, q_start + row, h, column], o_tile)
        else:
            first_row = (b.to(gl.int64) * seqlen_q + q_start + row) * num_heads + h
            store_rows(out + first_row * HEAD_DIM_V + column, o_rows, num_heads * HEAD_DIM_V, q_rows - row,
                       HEAD_DIM_V - column, WIDTH)  # fmt: skip
    else:
        tma_store(out_tiles, [b, row, h, column], o_tile)


@gluon.jit(
    do_not_specialize=[
        "batch", "num_heads", "group_size", "seqlen_q", "seqlen_k", "num_tiles", "heads_together", "window_left",
        "window_right",
    ]
)  # fmt: skip
def _attn_fwd_kernel(
    q, k, v, out_tiles, out, lse, counter, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    batch, num_heads, group_size, seqlen_q, seqlen_k, num_tiles, heads_together, window_left, window_right,
    softmax_scale, softcap,
    HEAD_DIM_V: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, MASK_FIRST: gl.constexpr, MASK_ALL: gl.constexpr, DIAGONAL: gl.constexpr,
    FIRST_MAX: gl.constexpr, EMPTY_ROWS: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALE_FIRST: gl.constexpr, NWG: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, PINGPONG: gl.constexpr,
    O_PARTS: gl.constexpr, NAMED: gl.constexpr, QREG: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) and out_tiles (B, Sq, H, Dv) as TMA descriptors; out is the
    memory of out_tiles; lse (B, H, Sq). Packed: B = 1, and the lengths of the sequences in cu_seqlens."""
    RAGGED: gl.constexpr = cu_seqlens_q is not None or seqused_q is not None or seqused_k is not None
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [NWG, 1, 64, 1, BLOCK_D], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [NST, 1, BLOCK_N, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [NST, 1, BLOCK_N, 1, BLOCK_DV], v.layout)
    o_s = gl.allocate_shared_memory(dtype, [NWG, 1, 64, 1, BLOCK_DV // O_PARTS], out_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    facts = gl.allocate_shared_memory(gl.int32, [2 * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    failed = gl.allocate_shared_memory(gl.int32, [2 * NWG, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    facts_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    facts_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    none = gl.zeros([64], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    for i in gl.static_range(2 * NWG):
        failed.index(i).store(none)
    for i in gl.static_range(2):
        mbarrier.init(facts_full.index(i), count=1)
        mbarrier.init(facts_empty.index(i), count=NWG)
    for i in gl.static_range(NWG):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(NST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NWG)
        mbarrier.init(v_empty.index(i), count=NWG)
    if PINGPONG and not NAMED:
        mbarrier.arrive(turn.index(0), count=1)
    fence_async_shared()

    left = window_left if HAS_LEFT else UNLIMITED
    right = window_right if HAS_RIGHT else UNLIMITED
    scale = softmax_scale if SOFTCAP else softmax_scale * LOG2_E
    outputs = (out_tiles, out, lse, o_s)
    queries = (q_s, q_s, q_full, q_empty)
    ring = (k_s, v_s, k_full, k_empty, v_full, v_empty)
    notes = (facts, facts_full, facts_empty, failed)
    sides = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    shared = (outputs, queries, ring, notes, turn, num_heads, seqlen_q, seqlen_k, left, right, scale, softcap)
    # Written out, for a list or tuple that is given a name loses its compile-time values.
    if NWG == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, DIAGONAL, FIRST_MAX, EMPTY_ROWS, RAGGED, SOFTCAP, SCALE_FIRST,
                             PINGPONG, O_PARTS, NAMED, QREG)),
                (_consumer, (shared, 1, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, DIAGONAL, FIRST_MAX, EMPTY_ROWS, RAGGED, SOFTCAP, SCALE_FIRST,
                             PINGPONG, O_PARTS, NAMED, QREG)),
                (producer, (q, None, k, v, queries, ring, notes, counter, sides, batch, num_heads, group_size, seqlen_q,
                            seqlen_k, num_tiles, heads_together, left, right, NWG, BLOCK_N, NST, NST, 0, HAS_LEFT,
                            FIRST_MAX, NAMED)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, DIAGONAL, FIRST_MAX, EMPTY_ROWS, RAGGED, SOFTCAP, SCALE_FIRST,
                             PINGPONG, O_PARTS, NAMED, QREG)),
                (_consumer, (shared, 1, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, DIAGONAL, FIRST_MAX, EMPTY_ROWS, RAGGED, SOFTCAP, SCALE_FIRST,
                             PINGPONG, O_PARTS, NAMED, QREG)),
                (_consumer, (shared, 2, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, DIAGONAL, FIRST_MAX, EMPTY_ROWS, RAGGED, SOFTCAP, SCALE_FIRST,
                             PINGPONG, O_PARTS, NAMED, QREG)),
                (producer, (q, None, k, v, queries, ring, notes, counter, sides, batch, num_heads, group_size, seqlen_q,
                            seqlen_k, num_tiles, heads_together, left, right, NWG, BLOCK_N, NST, NST, 0, HAS_LEFT,
                            FIRST_MAX, NAMED)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
