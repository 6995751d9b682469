"""FlashAttention-3 forward in Gluon, for Hopper (sm_90).

A program is persistent: it takes tiles of NWG * 64 query rows of one (sequence, head) from a counter in global memory,
the longest first. One warp, the producer, locates the tile and fetches it with TMA: Q once, K and V block by block,
from the last key block to the first, into rings of NST stages, each guarded by barriers. NWG warpgroups consume, 64
rows each. For each block j of keys a consumer

    issues   S_j = Q K_j^T               (WGMMA, asynchronous)
    issues   O += P_{j-1} V_{j-1}        (O rescaled by the factor of block j - 1 while S_j is computed)
    computes m, P_j = exp2(S_j - m), l   (beside P V on the tensor cores, and beside the other warpgroups' S)

so that exponentials and matrix products overlap within a warpgroup; PINGPONG lets the warpgroups take turns in issuing.
Only blocks that hold a hidden pair are masked. As in `fa2`, scores are in log2 units, O is divided by l at the end, and
a row that sees no key gets out 0 and lse -inf.

TMA addresses tensors as (batch, row, head, column); packed sequences are one batch entry. It reads zeros past a tensor,
but the neighbour's rows past a sequence: their scores are masked, their V rows zeroed in shared memory (0 * NaN is
NaN), and a tile that ends past its sequence is stored row by row.

Source: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2, algorithms 1 and 2.
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

from ..fa2.common import LN_2, LOG2_E, UNLIMITED, key_range, locate_tile, other_side, seen_keys, tanh, used_length
from .versions import tma_load, tma_store

# What the producer tells the consumers about a tile, in shared memory.
_FACTS = gl.constexpr(8)
# The start of the row maximum, the least finite number: exp2(-inf - m) must not become exp2(-inf + inf).
_LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.jit
def _key_blocks(start_m, used_q, used_k, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Key blocks [first, first + count) that some row of the tile sees."""
    lo, hi = key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
    first = lo // BLOCK_N
    count = gl.where(hi > lo, gl.cdiv(hi, BLOCK_N) - first, 0)
    return first, count


@gluon.jit
def _send(notes, n, more, start_m, used_q, used_k, q_start, q_rows, b, h):
    """Tell the consumers about tile number n of this program. There is room for two tiles."""
    facts, facts_full, facts_empty = notes
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(facts_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    zero = gl.full([1], 0, gl.int32, layout)
    place = (n & 1) * _FACTS
    facts.index(place).store(zero + more)
    facts.index(place + 1).store(zero + start_m)
    facts.index(place + 2).store(zero + used_q)
    facts.index(place + 3).store(zero + used_k)
    facts.index(place + 4).store(zero + q_start)
    facts.index(place + 5).store(zero + q_rows)
    facts.index(place + 6).store(zero + b)
    facts.index(place + 7).store(zero + h)
    mbarrier.arrive(facts_full.index(n & 1), count=1)


@gluon.jit
def _fact(notes, n, i: gl.constexpr):
    facts = notes[0]
    return gl.max(facts.index((n & 1) * _FACTS + i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _receive(notes, n):
    """Whether there is a tile number n, as soon as that is known."""
    facts_full = notes[1]
    mbarrier.wait(facts_full.index(n & 1), (n >> 1) & 1)
    return _fact(notes, n, 0)


@gluon.jit
def _producer(
    q, k, v, queries, ring, notes, counter, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batch, num_heads,
    group_size, seqlen_q, seqlen_k, num_tiles, heads_together, left, right, NWG: gl.constexpr, BLOCK_N: gl.constexpr,
    NST: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    q_s, q_full, q_empty = queries
    k_s, v_s, k_full, k_empty, v_full, v_empty = ring
    BLOCK_M: gl.constexpr = NWG * 64
    programs = gl.num_programs(0)
    blocks_before = 0
    tiles_before = 0  # that were sent
    queries_before = 0  # tiles that read Q
    tile = gl.program_id(0)
    while tile < num_tiles:
        following = gl.atomic_add(counter, 1) + programs
        if cu_seqlens_q is not None:
            # Backwards: the last block of a sequence has the most keys under a causal mask.
            nth = num_tiles - 1 - tile
            b, block, q_start, q_rows = locate_tile(nth // num_heads, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
            h = nth % num_heads
            k_start, k_rows = other_side(b, cu_seqlens_k, batch, seqlen_k)
        else:
            # The longest tiles of heads_together heads, whose K and V share the L2 cache, then their next longest.
            num_m = gl.cdiv(seqlen_q, BLOCK_M)
            group = tile // (num_m * heads_together)
            member = tile % (num_m * heads_together)
            heads = gl.minimum(batch * num_heads - group * heads_together, heads_together)
            block = num_m - 1 - member // heads
            b = (group * heads_together + member % heads) // num_heads
            h = (group * heads_together + member % heads) % num_heads
            q_start, q_rows, k_start, k_rows = 0, seqlen_q, 0, seqlen_k
        used_q = used_length(seqused_q, b, batch, q_rows)
        used_k = used_length(seqused_k, b, batch, k_rows)
        start_m = block * BLOCK_M
        batch_row = b if cu_seqlens_q is None else 0
        if start_m < q_rows:
            _send(notes, tiles_before, 1, start_m, used_q, used_k, q_start, q_rows, batch_row, h)
            tiles_before += 1
            first, count = _key_blocks(start_m, used_q, used_k, left, right, BLOCK_M, BLOCK_N)
            hk = h // group_size
            for n in range(count):
                row = k_start + (first + count - 1 - n) * BLOCK_N
                stage = blocks_before % NST
                _acquire(k_empty, blocks_before, 5, NWG, NST, NAMED)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                tma_load(k, [batch_row, row, hk, 0], k_full.index(stage), k_s.index(stage))
                if n == 0:  # after the first K, which has room while the consumers still hold the old Q
                    for w in gl.static_range(NWG):
                        mbarrier.wait(q_empty.index(w), (queries_before & 1) ^ 1)
                        mbarrier.expect(q_full.index(w), q.block_type.nbytes)
                        tma_load(q, [batch_row, q_start + start_m + w * 64, h, 0], q_full.index(w), q_s.index(w))
                    queries_before += 1
                _acquire(v_empty, blocks_before, 12, NWG, NST, NAMED)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                tma_load(v, [batch_row, row, hk, 0], v_full.index(stage), v_s.index(stage))
                blocks_before += 1
        tile = following
    _send(notes, tiles_before, 0, 0, 0, 0, 0, 0, 0, 0)
    if NAMED:  # leave no hardware barrier half full
        for i in gl.static_range(NST):
            if i < blocks_before:
                _acquire(k_empty, NST + i, 5, NWG, NST, NAMED)
                _acquire(v_empty, NST + i, 12, NWG, NST, NAMED)
    # The last program to end leaves the counter as it found it, for the next launch on this stream.
    if gl.atomic_add(counter + 1, 1) == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _score(s, scale, softcap, SOFTCAP: gl.constexpr, SCALE_FIRST: gl.constexpr):
    """q.k to the score in log2 units, if that is not left to the exponential."""
    if SOFTCAP:
        s = tanh(s * (scale / softcap)) * (softcap * LOG2_E)
    elif SCALE_FIRST:
        s = s * scale
    return s


@gluon.jit
def _hides(start_n, row, used_q, used_k, left, right, HAS_LEFT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Whether some of 64 rows does not see every key of a block."""
    position = row + used_k - used_q
    hides = start_n + BLOCK_N > gl.minimum(position + right + 1, used_k)
    if HAS_LEFT:
        hides = hides | (start_n < position + 63 - left)
    return hides


@gluon.jit
def _mask(s, start_n, row, used_q, used_k, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
          BLOCK_N: gl.constexpr):  # fmt: skip
    """-inf where key start_n + j is hidden from row row + i. The columns are split as 8 a + c, where a is an index of
    registers only: comparisons are with constants, and no column index stays in registers."""
    layout: gl.constexpr = s.type.layout
    s3 = gl.reshape(s, [64, BLOCK_N // 8, 8])
    layout3: gl.constexpr = s3.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout3))
    a = gl.arange(0, BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout3))) * 8
    a = gl.expand_dims(gl.expand_dims(a, 0), 2)
    c = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout3)))
    c = gl.expand_dims(gl.expand_dims(c, 0), 1)
    last = used_k - 1 - start_n
    position = gl.arange(0, 64, rows_layout) + (row + used_k - used_q - start_n)
    if HAS_RIGHT:
        visible = gl.expand_dims(gl.expand_dims(gl.minimum(position + right, last), 1), 2) - c >= a
    else:
        visible = last - c >= a
    if HAS_LEFT:
        visible = visible & (gl.expand_dims(gl.expand_dims(position - left, 1), 2) - c <= a)
    s3 = gl.where(visible, s3, float("-inf"))
    return gl.convert_layout(gl.reshape(s3, [64, BLOCK_N]), layout, assert_trivial=True)


@gluon.jit
def _clear_rows(tile, lo, hi, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Zero the rows of a tile in shared memory outside [lo, hi). Several warpgroups may do so at once: all write the
    same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    for i in gl.static_range(ROWS // 16):
        if (i * 16 < lo) | (i * 16 + 16 > hi):
            part = tile.slice(i * 16, 16, 0)
            rows = i * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            x = part.load(layout)
            part.store(gl.where(gl.expand_dims((rows >= lo) & (rows < hi), 1), x, 0.0).to(tile.dtype))
    fence_async_shared()


@gluon.jit
def _row_sum(p, BLOCK_N: gl.constexpr):
    """Sums over the columns that a thread holds; lanes are added up at the end of the tile."""
    return gl.sum(gl.reshape(p, [64, BLOCK_N // 8, 8]), axis=1)


@gluon.jit
def _rescaled(o, alpha):
    return o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.jit
def _barrier(code: gl.constexpr, number):
    """A hardware barrier, for which Gluon has no name. Runs once per thread; the result is there because the operation
    needs one. Triton uses numbers 0 to 4 beside three workers; here 5 to 8 guard K, 12 to 15 V, and 9 to 11 turns."""
    gl.inline_asm_elementwise(code, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release(empty, stage, FIRST: gl.constexpr, NWG: gl.constexpr, NAMED: gl.constexpr):
    """A consumer has read a stage. By hardware barrier its warps need not wait for each other first."""
    if not NAMED:
        mbarrier.arrive(empty.index(stage), count=1)
    elif NWG == 2:
        _barrier("bar.arrive $1, 288; mov.b32 $0, $1;", stage + FIRST)
    else:
        _barrier("bar.arrive $1, 416; mov.b32 $0, $1;", stage + FIRST)


@gluon.jit
def _acquire(empty, n, FIRST: gl.constexpr, NWG: gl.constexpr, NST: gl.constexpr, NAMED: gl.constexpr):
    """The producer may write block n to its stage."""
    if not NAMED:
        mbarrier.wait(empty.index(n % NST), ((n // NST) & 1) ^ 1)
    elif n >= NST:
        if NWG == 2:
            _barrier("bar.sync $1, 288; mov.b32 $0, $1;", n % NST + FIRST)
        else:
            _barrier("bar.sync $1, 416; mov.b32 $0, $1;", n % NST + FIRST)


@gluon.jit
def _wait_turn(turn, n, WG: gl.constexpr, PINGPONG: gl.constexpr, NAMED: gl.constexpr):
    if PINGPONG:
        if NAMED:
            _barrier("bar.sync $1, 256; mov.b32 $0, $1;", 9 + WG)
        else:
            mbarrier.wait(turn.index(WG), n & 1)


@gluon.jit
def _pass_turn(turn, WG: gl.constexpr, NWG: gl.constexpr, NAMED: gl.constexpr):
    if NAMED:
        _barrier("bar.arrive $1, 256; mov.b32 $0, $1;", 9 + (WG + 1) % NWG)
    else:
        mbarrier.arrive(turn.index((WG + 1) % NWG), count=1)


@gluon.jit
def _pack(p, dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Weights in pairs of 16 bits. If single ones are carried through the loop, ptxas swaps the halves of each pair and
    swaps them back."""
    even, odd = gl.split(gl.reshape(p, [64, BLOCK_N // 2, 2]))
    code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(code, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    even = pairs.to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, BLOCK_N]), layout, assert_trivial=True)


@gluon.jit
def _row_max(s, m_i, scale, SCALED: gl.constexpr):
    if SCALED:
        return gl.maximum(m_i, gl.max(s, 1))
    return gl.maximum(m_i, gl.max(s, 1) * scale)


@gluon.jit
def _weights(s, m_i, scale, SCALED: gl.constexpr):
    if SCALED:
        return gl.exp2(s - gl.expand_dims(m_i, 1))
    return gl.exp2(s * scale - gl.expand_dims(m_i, 1))


@gluon.jit
def _consumer(
    shared, WG: gl.constexpr, NWG: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    MASK_FIRST: gl.constexpr, MASK_ALL: gl.constexpr, RAGGED: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALE_FIRST: gl.constexpr, PINGPONG: gl.constexpr, SHARE_O: gl.constexpr, NAMED: gl.constexpr, QREG: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr,
):  # fmt: skip
    outputs, queries, ring, notes, turn, num_heads, seqlen_q, seqlen_k, left, right, scale, softcap = shared
    out_tiles, out, lse, o_s = outputs
    q_s, q_full, q_empty = queries
    k_s, v_s, k_full, k_empty, v_full, v_empty = ring
    facts_empty = notes[2]
    BLOCK_M: gl.constexpr = NWG * 64
    SCALED: gl.constexpr = SOFTCAP or SCALE_FIRST
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    if PINGPONG and NAMED and WG == NWG - 1:
        _pass_turn(turn, WG, NWG, NAMED)  # warpgroup 0 goes first
    it = 0
    tiles_before = 0
    queries_before = 0
    while _receive(notes, tiles_before) > 0:
        start_m = _fact(notes, tiles_before, 1)
        used_q = _fact(notes, tiles_before, 2) if RAGGED else seqlen_q
        used_k = _fact(notes, tiles_before, 3) if RAGGED else seqlen_k
        row = start_m + WG * 64
        first, count = _key_blocks(start_m, used_q, used_k, left, right, BLOCK_M, BLOCK_N)
        # V rows that no row of the sequence sees must not take part, whatever they hold.
        seen_lo, _seen_hi = seen_keys(used_q, used_k, left, right)
        if count > 0:
            # The last key block, alone.
            m_i = gl.full([64], _LOWEST, gl.float32, row_layout)
            o = gl.zeros([64, BLOCK_DV], gl.float32, o_layout)
            mbarrier.wait(q_full.index(WG), queries_before & 1)
            q = q_s.index(WG).reshape([64, BLOCK_D])
            if QREG:
                q = q.load(gl.DotOperandLayout(0, s_layout, 2))
                if not SHARE_O:
                    mbarrier.arrive(q_empty.index(WG), count=1)
            stage = it % NST
            mbarrier.wait(k_full.index(stage), (it // NST) & 1)
            _wait_turn(turn, it, WG, PINGPONG, NAMED)
            zero_s = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
            s_token = warpgroup_mma(
                q, k_s.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)), zero_s, use_acc=False, is_async=True
            )
            if PINGPONG:
                _pass_turn(turn, WG, NWG, NAMED)
            s = warpgroup_mma_wait(0, deps=[s_token])
            _release(k_empty, stage, 5, NWG, NAMED)
            s = _score(s, scale, softcap, SOFTCAP, SCALE_FIRST)
            start_n = (first + count - 1) * BLOCK_N
            if MASK_FIRST:
                s = _mask(s, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
            m_i = _row_max(s, m_i, scale, SCALED)
            p = _weights(s, m_i, scale, SCALED)
            alpha = m_i * 0.0 + 1.0
            l_i = _row_sum(p, BLOCK_N)
            pairs = _pack(p, dtype, BLOCK_N)
            if RAGGED or HAS_LEFT:
                if (start_n < seen_lo) | (start_n + BLOCK_N > used_k):
                    mbarrier.wait(v_full.index(stage), (it // NST) & 1)
                    v_tile = v_s.index(stage).reshape([BLOCK_N, BLOCK_DV])
                    _clear_rows(v_tile, seen_lo - start_n, used_k - start_n, BLOCK_N, BLOCK_DV)
            it += 1
            mbarrier.wait(k_full.index(it % NST), (it // NST) & 1, pred=count > 1)

            for n in range(1, count):
                start_n = (first + count - 1 - n) * BLOCK_N
                stage = it % NST
                before = (it - 1) % NST
                v_tile = v_s.index(before).reshape([BLOCK_N, BLOCK_DV])
                _wait_turn(turn, it, WG, PINGPONG, NAMED)
                zero_s = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
                s_token = warpgroup_mma(
                    q, k_s.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)), zero_s, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                mbarrier.wait(v_full.index(before), ((it - 1) // NST) & 1)
                # S is on its way. The no-op keeps LLVM from moving the product back to where alpha was made.
                alpha = gl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=f,f", [alpha], dtype=gl.float32, is_pure=False, pack=1
                )
                o = _rescaled(o, alpha)
                p16 = _unpack(pairs, dtype, p_layout, BLOCK_N)
                o_token = warpgroup_mma(p16, v_tile, o, is_async=True)
                if PINGPONG:
                    _pass_turn(turn, WG, NWG, NAMED)
                s = warpgroup_mma_wait(1, deps=[s_token])
                _release(k_empty, stage, 5, NWG, NAMED)
                s = _score(s, scale, softcap, SOFTCAP, SCALE_FIRST)
                if MASK_ALL:
                    if _hides(start_n, row, used_q, used_k, left, right, HAS_LEFT, BLOCK_N):
                        s = _mask(s, start_n, row, used_q, used_k, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N)
                m_new = _row_max(s, m_i, scale, SCALED)
                if WEIGHTS_FIRST:  # the order in which ptxas schedules them
                    p = _weights(s, m_new, scale, SCALED)
                    alpha = gl.exp2(m_i - m_new)
                else:
                    alpha = gl.exp2(m_i - m_new)
                    p = _weights(s, m_new, scale, SCALED)
                m_i = m_new
                l_i = l_i * gl.convert_layout(gl.expand_dims(alpha, 1), l_i.type.layout) + _row_sum(p, BLOCK_N)
                # Waiting for the next K here ends the basic block. Without that ptxas moves the wait for P V, which
                # must follow the exponentials, in front of them; p, alpha and l among its operands keep LLVM from it.
                mbarrier.wait(k_full.index((it + 1) % NST), ((it + 1) // NST) & 1, pred=n + 1 < count)
                o, p16, p, alpha, l_i = warpgroup_mma_wait(0, deps=[o_token, p16, p, alpha, l_i])
                _release(v_empty, before, 12, NWG, NAMED)
                pairs = _pack(p, dtype, BLOCK_N)
                if HAS_LEFT:
                    if start_n < seen_lo:
                        mbarrier.wait(v_full.index(stage), (it // NST) & 1)
                        v_now = v_s.index(stage).reshape([BLOCK_N, BLOCK_DV])
                        _clear_rows(v_now, seen_lo - start_n, BLOCK_N, BLOCK_N, BLOCK_DV)
                it += 1

            if not SHARE_O and not QREG:
                mbarrier.arrive(q_empty.index(WG), count=1)
            o = _rescaled(o, alpha)
            before = (it - 1) % NST
            mbarrier.wait(v_full.index(before), ((it - 1) // NST) & 1)
            p16 = _unpack(pairs, dtype, p_layout, BLOCK_N)
            o_token = warpgroup_mma(p16, v_s.index(before).reshape([BLOCK_N, BLOCK_DV]), o, is_async=True)
            l_sum = gl.convert_layout(gl.sum(l_i, 1), row_layout)
            o = warpgroup_mma_wait(0, deps=[o_token])
            _release(v_empty, before, 12, NWG, NAMED)

            q_start, q_rows, b, h = _place(notes, tiles_before, seqlen_q, RAGGED)
            offs_m = row + gl.arange(0, 64, row_layout)
            sees = (l_sum != 0.0) & (offs_m < used_q)
            lse_i = gl.where(sees, (m_i + gl.log2(l_sum)) * LN_2, float("-inf"))
            gl.store(lse + (b * num_heads + h).to(gl.int64) * seqlen_q + q_start + offs_m, lse_i, mask=offs_m < q_rows)
            o = _rescaled(o, gl.where(sees, 1.0 / l_sum, 0.0))
            o = gl.where(gl.expand_dims(gl.convert_layout(sees, gl.SliceLayout(1, o_layout)), 1), o, 0.0)
            o_tile = o_s.index(WG)
            o_rows = o_tile.reshape([64, BLOCK_DV])
            if not SHARE_O:
                tma.store_wait(0)
            o_rows.store(o.to(dtype))
            fence_async_shared()
            if RAGGED:
                if row + 64 <= q_rows:
                    tma_store(out_tiles, [b, q_start + row, h, 0], o_tile)
                else:
                    first_row = (b.to(gl.int64) * seqlen_q + q_start + row) * num_heads + h
                    _store_rows(out + first_row * HEAD_DIM_V, o_rows, num_heads * HEAD_DIM_V, q_rows - row, HEAD_DIM_V,
                                BLOCK_DV)  # fmt: skip
            else:
                tma_store(out_tiles, [b, row, h, 0], o_tile)
            if SHARE_O:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(WG), count=1)
            queries_before += 1
        else:
            q_start, q_rows, b, h = _place(notes, tiles_before, seqlen_q, RAGGED)
            offs_m = row + gl.arange(0, 64, row_layout)
            hidden = gl.full([64], float("-inf"), gl.float32, row_layout)
            gl.store(lse + (b * num_heads + h).to(gl.int64) * seqlen_q + q_start + offs_m, hidden, mask=offs_m < q_rows)
            first_row = (b.to(gl.int64) * seqlen_q + q_start + row) * num_heads + h
            _store_zeros(out + first_row * HEAD_DIM_V, num_heads * HEAD_DIM_V, q_rows - row, HEAD_DIM_V, BLOCK_DV)
        mbarrier.arrive(facts_empty.index(tiles_before & 1), count=1)
        tiles_before += 1
    if PINGPONG and NAMED and WG == 0:
        _wait_turn(turn, it, WG, PINGPONG, NAMED)  # the last turn that was passed
    tma.store_wait(0)


@gluon.jit
def _place(notes, n, seqlen_q, RAGGED: gl.constexpr):
    """Where a tile's sequence starts, its rows, and its batch entry and head."""
    q_start = _fact(notes, n, 4) if RAGGED else 0
    q_rows = _fact(notes, n, 5) if RAGGED else seqlen_q
    return q_start, q_rows, _fact(notes, n, 6), _fact(notes, n, 7)


@gluon.jit
def _store_rows(out, o_rows, stride, rows_left, HEAD_DIM_V: gl.constexpr, BLOCK_DV: gl.constexpr):
    """The first rows_left of 64 rows in shared memory to out."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    for i in gl.static_range(4):
        _store_part(out, o_rows.slice(i * 16, 16, 0).load(layout), i * 16, stride, rows_left, HEAD_DIM_V)


@gluon.jit
def _store_zeros(out, stride, rows_left, HEAD_DIM_V: gl.constexpr, BLOCK_DV: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    zero = gl.zeros([16, BLOCK_DV], out.dtype.element_ty, layout)
    for i in gl.static_range(4):
        _store_part(out, zero, i * 16, stride, rows_left, HEAD_DIM_V)


@gluon.jit
def _store_part(out, x, first: gl.constexpr, stride, rows_left, HEAD_DIM_V: gl.constexpr):
    rows = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    offs_d = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    inside = gl.expand_dims(rows < rows_left, 1) & gl.expand_dims(offs_d < HEAD_DIM_V, 0)
    gl.store(out + gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(offs_d, 0), x, mask=inside)


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
    HAS_RIGHT: gl.constexpr, MASK_FIRST: gl.constexpr, MASK_ALL: gl.constexpr, SOFTCAP: gl.constexpr,
    SCALE_FIRST: gl.constexpr, NWG: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, PINGPONG: gl.constexpr,
    SHARE_O: gl.constexpr, NAMED: gl.constexpr, QREG: gl.constexpr, WEIGHTS_FIRST: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) and out_tiles (B, Sq, H, Dv) as TMA descriptors; out is the
    memory of out_tiles; lse (B, H, Sq). Packed: B = 1, and the lengths of the sequences in cu_seqlens."""
    RAGGED: gl.constexpr = cu_seqlens_q is not None or seqused_q is not None or seqused_k is not None
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [NWG, 1, 64, 1, BLOCK_D], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [NST, 1, BLOCK_N, 1, BLOCK_D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [NST, 1, BLOCK_N, 1, BLOCK_DV], v.layout)
    if SHARE_O:
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(dtype, [NWG, 1, 64, 1, BLOCK_DV], out_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    facts = gl.allocate_shared_memory(gl.int32, [2 * _FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    facts_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    facts_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
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
    queries = (q_s, q_full, q_empty)
    ring = (k_s, v_s, k_full, k_empty, v_full, v_empty)
    notes = (facts, facts_full, facts_empty)
    shared = (outputs, queries, ring, notes, turn, num_heads, seqlen_q, seqlen_k, left, right, scale, softcap)
    if NWG == 2:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, RAGGED, SOFTCAP, SCALE_FIRST, PINGPONG, SHARE_O, NAMED, QREG,
                             WEIGHTS_FIRST)),
                (_consumer, (shared, 1, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, RAGGED, SOFTCAP, SCALE_FIRST, PINGPONG, SHARE_O, NAMED, QREG,
                             WEIGHTS_FIRST)),
                (_producer, (q, k, v, queries, ring, notes, counter, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                             batch, num_heads, group_size, seqlen_q, seqlen_k, num_tiles, heads_together, left, right,
                             NWG, BLOCK_N, NST, NAMED)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (shared, 0, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, RAGGED, SOFTCAP, SCALE_FIRST, PINGPONG, SHARE_O, NAMED, QREG,
                             WEIGHTS_FIRST)),
                (_consumer, (shared, 1, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, RAGGED, SOFTCAP, SCALE_FIRST, PINGPONG, SHARE_O, NAMED, QREG,
                             WEIGHTS_FIRST)),
                (_consumer, (shared, 2, NWG, BLOCK_N, NST, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT,
                             MASK_FIRST, MASK_ALL, RAGGED, SOFTCAP, SCALE_FIRST, PINGPONG, SHARE_O, NAMED, QREG,
                             WEIGHTS_FIRST)),
                (_producer, (q, k, v, queries, ring, notes, counter, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                             batch, num_heads, group_size, seqlen_q, seqlen_k, num_tiles, heads_together, left, right,
                             NWG, BLOCK_N, NST, NAMED)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
