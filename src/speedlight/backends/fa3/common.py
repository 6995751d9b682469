"""Pieces of the FlashAttention-3 kernels: what producer and consumers tell each other, barriers, and a warpgroup's own
work on 64 rows of scores in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..fa2.common import LOG2_E, full_query_range, key_range, query_range, tanh
from .versions import tma_store

# Room for what the producer tells the consumers about a tile, in shared memory.
FACTS = gl.constexpr(16)
# The start of the row maximum, the least finite number: exp2(-inf - m) must not become exp2(-inf + inf).
LOWEST = gl.constexpr(-3.4028234663852886e38)
HIDDEN = gl.constexpr(float("-inf"))  # the score of a hidden pair


@gluon.jit
def key_blocks(start_m, used_q, used_k, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Key blocks [first, first + count) that some row of the tile sees."""
    lo, hi = key_range(start_m, start_m + BLOCK_M, used_q, used_k, left, right)
    first = lo // BLOCK_N
    count = gl.where(hi > lo, gl.cdiv(hi, BLOCK_N) - first, 0)
    return first, count


@gluon.jit
def seen_whole(row, first, used_q, used_k, right, BLOCK_N: gl.constexpr):
    """How many keys every row from the given one on sees if none is hidden on the left, and how many whole blocks."""
    seen = gl.minimum(gl.maximum(row + used_k - used_q + right + 1, 0), used_k)
    return seen, gl.maximum(seen // BLOCK_N - first, 0)


@gluon.jit
def masked_blocks(start_m, first, count, used_q, used_k, left, right, HAS_LEFT: gl.constexpr, BLOCK_M: gl.constexpr,
                  BLOCK_N: gl.constexpr):  # fmt: skip
    """How many blocks of a tile hold a pair that is hidden on the right, and how many of the others one hidden on the
    left. The last block, which comes first in any case, counts among the former if there are any of the latter."""
    _seen, whole = seen_whole(start_m, first, used_q, used_k, right, BLOCK_N)
    on_the_right = count - gl.minimum(whole, count)
    on_the_left = 0
    if HAS_LEFT:
        on_the_right = gl.maximum(on_the_right, gl.minimum(count, 1))
        first_seen_by_all = gl.maximum(start_m + BLOCK_M - 1 + used_k - used_q - left, 0)
        on_the_left = gl.maximum(gl.minimum(gl.cdiv(first_seen_by_all, BLOCK_N) - first, count - on_the_right), 0)
    return on_the_right, on_the_left


@gluon.jit
def key_block(n, first, count, on_the_right, on_the_left, HAS_LEFT: gl.constexpr):
    """The n-th block of a tile: from the last one to the first, but those masked on the left right after those masked
    on the right."""
    block = first + count - 1 - n
    if HAS_LEFT:
        beyond = gl.where(n < on_the_right + on_the_left, first + n - on_the_right, block + on_the_left)
        block = gl.where(n < on_the_right, block, beyond)
    return block


@gluon.jit
def query_blocks(start_n, used_q, used_k, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Blocks of rows [first, first + count) that see some key of a tile, how many of them hold a hidden pair, at the
    low and at the high end, and a number of the others that differs among neighbouring tiles."""
    lo, hi = query_range(start_n, start_n + BLOCK_N, used_q, used_k, left, right)
    whole_lo, whole_hi = full_query_range(start_n, start_n + BLOCK_N, used_q, used_k, left, right)
    first = lo // BLOCK_M
    count = gl.where(hi > lo, gl.cdiv(hi, BLOCK_M) - first, 0)
    low = gl.minimum(gl.maximum(gl.cdiv(whole_lo, BLOCK_M) - first, 0), count)
    high = count - gl.minimum(gl.maximum(whole_hi // BLOCK_M - first, low), count)
    partial = start_n + BLOCK_N > used_k  # these rows see all keys that there are
    low, high = gl.where(partial, count, low), gl.where(partial, 0, high)
    return first, count, low, high, start_n // BLOCK_N % 128 % gl.maximum(count - low - high, 1)


@gluon.jit
def query_block(n, count, low, high, turn):
    """The n-th block of rows of a tile, counted from its first one: those with hidden pairs first, and of the others
    that at the turn, so that programs that start together do not all add to the same dQ."""
    whole = count - low - high
    n_whole = n - low - high + turn
    n_whole = gl.where(n_whole >= whole, n_whole - whole, n_whole)
    masked = gl.where(n < low, n, count - high + n - low)
    return gl.where(n < low + high, masked, low + n_whole)


@gluon.jit
def blocks_to_first_max(row, first, count, used_q, used_k, right, on_the_right, on_the_left, HAS_LEFT: gl.constexpr,
                        BLOCK_N: gl.constexpr):  # fmt: skip
    """How many blocks of a tile, in its order, hold a pair hidden from one of 64 rows or are needed for each of the
    rows to see a key."""
    seen, whole = seen_whole(row, first, used_q, used_k, right, BLOCK_N)
    masked = on_the_right + on_the_left if HAS_LEFT else count - whole
    return gl.minimum(gl.where(seen % BLOCK_N == 0, masked + 1, masked), count)


@gluon.jit
def mark_failed(failed, rows, l_sum, o, dtype: gl.constexpr):
    """Note the rows whose weights got too large beside the maximum of their first block: float16 has no number from
    2^16 on, and with values that are large themselves o overflows sooner."""
    LIMIT: gl.constexpr = 2.0**15 if dtype == gl.float16 else 2.0**48
    finite = gl.convert_layout(gl.sum(o * 0.0, 1), l_sum.type.layout, assert_trivial=True) == 0.0
    failed.store((rows & ~((l_sum <= LIMIT) & finite)).to(gl.int32))


@gluon.jit
def await_writes():
    """Until this thread's bulk stores are in memory, not only read from shared memory: the next one may go to the same
    place."""
    code: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def has_failed(notes, n, NWG: gl.constexpr):
    """Whether tile number n - 2 has a row that failed; forgotten with that."""
    failed = notes[3]
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    any_row = gl.zeros([64], gl.int32, layout)
    for w in gl.static_range(NWG):
        rows = failed.index((n & 1) * NWG + w)
        any_row = any_row | rows.load(layout)
        rows.store(gl.zeros([64], gl.int32, layout))
    return gl.max(any_row, 0) > 0


@gluon.jit
def wait_for_room(notes, n):
    """Until tile number n - 2 is done. There is room for what is said about two tiles."""
    facts_empty = notes[2]
    mbarrier.wait(facts_empty.index(n & 1), ((n >> 1) & 1) ^ 1)


@gluon.jit
def send(notes, n, more, start, used_q, used_k, q_start, rows, b, h, rows_k, first_tile):
    """Tell the consumers about tile number n of this program. more: 0 there is none, 1 there is, 2 it takes maxima of
    all blocks."""
    facts, facts_full = notes[0], notes[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    place = (n & 1) * FACTS
    facts.index(place).store(zero + more)
    facts.index(place + 1).store(zero + start)
    facts.index(place + 2).store(zero + used_q)
    facts.index(place + 3).store(zero + used_k)
    facts.index(place + 4).store(zero + q_start)
    facts.index(place + 5).store(zero + rows)
    facts.index(place + 6).store(zero + b)
    facts.index(place + 7).store(zero + h)
    facts.index(place + 8).store(zero + rows_k)
    facts.index(place + 9).store(zero + first_tile)
    mbarrier.arrive(facts_full.index(n & 1), count=1)


@gluon.jit
def receive(notes, n):
    """Whether there is a tile number n, as soon as that is known."""
    facts_full = notes[1]
    mbarrier.wait(facts_full.index(n & 1), (n >> 1) & 1)
    return fact(notes, n, 0)


@gluon.jit
def fact(notes, n, i: gl.constexpr):
    facts = notes[0]
    return gl.max(facts.index((n & 1) * FACTS + i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def place(notes, n, seqlen_q, RAGGED: gl.constexpr):
    """Where a tile's sequence starts, its rows, and its batch entry and head."""
    q_start = fact(notes, n, 4) if RAGGED else 0
    q_rows = fact(notes, n, 5) if RAGGED else seqlen_q
    return q_start, q_rows, fact(notes, n, 6), fact(notes, n, 7)


@gluon.jit
def barrier(code: gl.constexpr, number):
    """A hardware barrier, for which Gluon has no name. Runs once per thread; the result is there because the operation
    needs one. Triton uses numbers 0 to 4 beside three workers; here 5 to 8 guard K, 12 to 15 V, and 9 to 11 turns."""
    gl.inline_asm_elementwise(code, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(empty, stage, FIRST: gl.constexpr, NWG: gl.constexpr, NAMED: gl.constexpr):
    """A consumer has read a stage. By hardware barrier its warps need not wait for each other first."""
    if not NAMED:
        mbarrier.arrive(empty.index(stage), count=1)
    elif NWG == 2:
        barrier("bar.arrive $1, 288; mov.b32 $0, $1;", stage + FIRST)
    else:
        barrier("bar.arrive $1, 416; mov.b32 $0, $1;", stage + FIRST)


@gluon.jit
def acquire(empty, n, FIRST: gl.constexpr, NWG: gl.constexpr, NST: gl.constexpr, NAMED: gl.constexpr):
    """The producer may write block n to its stage."""
    if not NAMED:
        mbarrier.wait(empty.index(n % NST), ((n // NST) & 1) ^ 1)
    elif n >= NST:
        if NWG == 2:
            barrier("bar.sync $1, 288; mov.b32 $0, $1;", n % NST + FIRST)
        else:
            barrier("bar.sync $1, 416; mov.b32 $0, $1;", n % NST + FIRST)


@gluon.jit
def wait_turn(turn, n, WG: gl.constexpr, PINGPONG: gl.constexpr, NAMED: gl.constexpr):
    if PINGPONG:
        if NAMED:
            barrier("bar.sync $1, 256; mov.b32 $0, $1;", 9 + WG)
        else:
            mbarrier.wait(turn.index(WG), n & 1)


@gluon.jit
def pass_turn(turn, WG: gl.constexpr, NWG: gl.constexpr, NAMED: gl.constexpr):
    if NAMED:
        barrier("bar.arrive $1, 256; mov.b32 $0, $1;", 9 + (WG + 1) % NWG)
    else:
        mbarrier.arrive(turn.index((WG + 1) % NWG), count=1)


@gluon.jit
def score(s, scale, softcap, SOFTCAP: gl.constexpr, SCALE_FIRST: gl.constexpr):
    """q.k to the score in log2 units, if that is not left to the exponential."""
    if SOFTCAP:
        s = tanh(s * (scale / softcap)) * (softcap * LOG2_E)
    elif SCALE_FIRST:
        s = s * scale
    return s


@gluon.jit
def issue_scores(q, k_s, stage, layout: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    kt = k_s.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(q, kt, gl.zeros([64, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def hides(start_n, row, used_q, used_k, left, right, HAS_LEFT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Whether some of 64 rows does not see every key of a block."""
    position = row + used_k - used_q
    hides = start_n + BLOCK_N > gl.minimum(position + right + 1, used_k)
    if HAS_LEFT:
        hides = hides | (start_n < position + 63 - left)
    return hides


@gluon.jit
def mask(s, hidden: gl.constexpr, start_n, row, used_q, used_k, left, right, HAS_LEFT: gl.constexpr,
         HAS_RIGHT: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """hidden where key start_n + j is so from row row + i. The columns are split as 8 a + c, where a is an index of
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
    s3 = gl.where(visible, s3, hidden)
    return gl.convert_layout(gl.reshape(s3, [64, BLOCK_N]), layout, assert_trivial=True)


@gluon.jit
def mask_transposed(x, hidden: gl.constexpr, key, start_m, used_q, used_k, left, right, HAS_LEFT: gl.constexpr,
                    HAS_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """As mask, for 64 keys from the given one on along the first axis and rows of the problem along the second."""
    layout: gl.constexpr = x.type.layout
    x3 = gl.reshape(x, [64, BLOCK_M // 8, 8])
    layout3: gl.constexpr = x3.type.layout
    a = gl.arange(0, BLOCK_M // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout3))) * 8
    a = gl.expand_dims(gl.expand_dims(a, 0), 2)
    c = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout3)))
    c = gl.expand_dims(gl.expand_dims(c, 0), 1)
    keys = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout3))) + key
    # The row at which a key stands, counted from start_m.
    at = keys + (used_q - used_k - start_m)
    last = gl.where(keys < used_k, used_q - 1 - start_m, -1)
    if HAS_LEFT:
        last = gl.minimum(last, at + left)
    visible = gl.expand_dims(gl.expand_dims(last, 1), 2) - c >= a
    if HAS_RIGHT:
        visible = visible & (gl.expand_dims(gl.expand_dims(at - right, 1), 2) - c <= a)
    x3 = gl.where(visible, x3, hidden)
    return gl.convert_layout(gl.reshape(x3, [64, BLOCK_M]), layout, assert_trivial=True)


@gluon.jit
def clear_rows(tile, lo, hi, ROWS: gl.constexpr, DIM: gl.constexpr):
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
def halves(s, BLOCK_N: gl.constexpr):
    """The first and the second half of the columns: other registers, nothing moves."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 16])
    near, far = gl.split(gl.permute(gl.reshape(s, [64, 2, BLOCK_N // 2]), (0, 2, 1)))
    return gl.convert_layout(near, layout, assert_trivial=True), gl.convert_layout(far, layout, assert_trivial=True)


@gluon.jit
def join_halves(near, far, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    s = gl.reshape(gl.permute(gl.join(near, far), (0, 2, 1)), [64, BLOCK_N])
    return gl.convert_layout(s, layout, assert_trivial=True)


@gluon.jit
def row_max(s, m_i, scale, SCALED: gl.constexpr):
    highest = gl.convert_layout(gl.max(s, 1), m_i.type.layout, assert_trivial=True)
    return gl.maximum(m_i, highest if SCALED else highest * scale)


@gluon.jit
def first_max(s, m_i, scale, whole, SCALED: gl.constexpr, FIRST_MAX: gl.constexpr, BLOCK_N: gl.constexpr):
    """Row maximum of the first block, or if that will do, of its first columns: a row that sees any key of it sees one
    of those."""
    if FIRST_MAX:
        near, _far = halves(s, BLOCK_N)
        near, _far = halves(near, BLOCK_N // 2)
        m_i = row_max(near, m_i, scale, SCALED)
        if whole:
            m_i = row_max(s, m_i, scale, SCALED)
        return m_i
    return row_max(s, m_i, scale, SCALED)


@gluon.jit
def weights(s, m_i, scale, SCALED: gl.constexpr):
    m = gl.expand_dims(gl.convert_layout(m_i, gl.SliceLayout(1, s.type.layout), assert_trivial=True), 1)
    return gl.exp2(s - m if SCALED else s * scale - m)


@gluon.jit
def log2(x):
    """For x from 2^-126 on, and 0 and NaN; Gluon's has a branch for smaller ones."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def row_sum(p, BLOCK_N: gl.constexpr):
    """Sums over the columns that a thread holds; lanes are added up at the end of the tile."""
    return gl.sum(gl.reshape(p, [64, BLOCK_N // 8, 8]), axis=1)


@gluon.jit
def rescaled(o, alpha):
    return o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.jit
def pack(p, dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Weights in pairs of 16 bits. If single ones are carried through the loop, ptxas swaps the halves of each pair and
    swaps them back."""
    even, odd = gl.split(gl.reshape(p, [64, BLOCK_N // 2, 2]))
    code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(code, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    even = pairs.to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, BLOCK_N]), layout, assert_trivial=True)


@gluon.jit
def store_tile(x, tiles, pointer, place, batch_row, row, h, rows_left, num_heads, seqlen, DIM: gl.constexpr,
               RAGGED: gl.constexpr):  # fmt: skip
    """64 rows of a gradient, of which rows_left belong to the sequence."""
    BLOCK: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    place.reshape([64, BLOCK]).store(unpack(pack(x, tiles.dtype, BLOCK), tiles.dtype, layout, BLOCK))
    fence_async_shared()
    if RAGGED:
        if rows_left >= 64:
            tma_store(tiles, [batch_row, row, h, 0], place)
        else:
            first_row = (batch_row.to(gl.int64) * seqlen + row) * num_heads + h
            store_rows(pointer + first_row * DIM, place.reshape([64, BLOCK]), num_heads * DIM, rows_left, DIM, BLOCK)
    else:
        tma_store(tiles, [batch_row, row, h, 0], place)


@gluon.jit
def store_rows(out, o_rows, stride, rows_left, HEAD_DIM_V: gl.constexpr, BLOCK_DV: gl.constexpr):
    """The first rows_left of 64 rows in shared memory to out."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    for i in gl.static_range(4):
        store_part(out, o_rows.slice(i * 16, 16, 0).load(layout), i * 16, stride, rows_left, HEAD_DIM_V)


@gluon.jit
def store_zeros(out, stride, rows_left, HEAD_DIM_V: gl.constexpr, BLOCK_DV: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0])
    zero = gl.zeros([16, BLOCK_DV], out.dtype.element_ty, layout)
    for i in gl.static_range(4):
        store_part(out, zero, i * 16, stride, rows_left, HEAD_DIM_V)


@gluon.jit
def store_part(out, x, first: gl.constexpr, stride, rows_left, HEAD_DIM_V: gl.constexpr):
    rows = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    offs_d = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    inside = gl.expand_dims(rows < rows_left, 1) & gl.expand_dims(offs_d < HEAD_DIM_V, 0)
    gl.store(out + gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(offs_d, 0), x, mask=inside)
