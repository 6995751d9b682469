"""The producers of the FlashAttention-3 kernels: one warp that takes tiles, tells the consumers about them, and fetches
what they read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..fa2.common import locate_tile, other_side, used_length
from .common import (
    acquire,
    has_failed,
    key_block,
    key_blocks,
    masked_blocks,
    query_block,
    query_blocks,
    send,
    wait_for_room,
)
from .versions import tma_load


@gluon.jit
def _locate(tile, sides, batch, num_heads, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M: gl.constexpr):
    """Batch entry and head of a tile, its first row, and of its sequence: the start, the rows, and the used lengths."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sides
    tile = gl.minimum(tile, num_tiles - 1)
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
    return b, h, block * BLOCK_M, q_start, q_rows, used_q, used_k, k_start


@gluon.jit
def _fetch_key_block(tensor, ring, full, empty, FIRST: gl.constexpr, n, where, NWG: gl.constexpr, NST: gl.constexpr,
                     NAMED: gl.constexpr):  # fmt: skip
    """K or V of block number n."""
    acquire(empty, n, FIRST, NWG, NST, NAMED)
    mbarrier.expect(full.index(n % NST), tensor.block_type.nbytes)
    tma_load(tensor, where, full.index(n % NST), ring.index(n % NST))


@gluon.jit
def producer(
    q, dout, k, v, queries, ring, notes, counter, sides, batch, num_heads, group_size, seqlen_q, seqlen_k, num_tiles,
    heads_together, left, right, NWG: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr, NSTV: gl.constexpr,
    ROWS: gl.constexpr, HAS_LEFT: gl.constexpr, FIRST_MAX: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """Of the forward pass, and with dout of dQ by itself: Q (and dO) of a tile once, and K and V block by block. ROWS:
    of the tiles by which lse and delta are kept (preprocess.py)."""
    q_s, do_s, q_full, q_empty = queries
    k_s, v_s, k_full, k_empty, v_full, v_empty = ring
    BLOCK_M: gl.constexpr = NWG * 64
    programs = gl.num_programs(0)
    blocks_before = 0
    tiles_before = 0  # that were sent
    queries_before = 0  # tiles that read Q
    more = 1
    sent, sent_before = -1, -1  # the last tiles
    again = -1  # one that failed for want of maxima
    tile = gl.program_id(0)
    b, h, start_m, q_start, q_rows, used_q, used_k, k_start = _locate(
        tile, sides, batch, num_heads, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M
    )
    while tile < num_tiles:
        batch_row = b if sides[0] is None else 0
        hk = h // group_size
        rows = k_start
        first, count, on_the_right, on_the_left = 0, 0, 0, 0
        if start_m < q_rows:
            wait_for_room(notes, tiles_before)
            if FIRST_MAX:
                if tiles_before >= 2:
                    if has_failed(notes, tiles_before, NWG):
                        again = sent_before
                sent, sent_before = tile, sent
            first_tile = 0
            if dout is not None:
                first_tile = b * gl.cdiv(seqlen_q, ROWS) if sides[0] is None else q_start // ROWS + b
            send(notes, tiles_before, more, start_m, used_q, used_k, q_start, q_rows, batch_row, h, 0, first_tile)
            tiles_before += 1
            first, count = key_blocks(start_m, used_q, used_k, left, right, BLOCK_M, BLOCK_N)
            on_the_right, on_the_left = masked_blocks(
                start_m, first, count, used_q, used_k, left, right, HAS_LEFT, BLOCK_M, BLOCK_N
            )
            if count > 0:
                row = rows + (first + count - 1) * BLOCK_N
                # The first K before Q, since it has room while the consumers still hold the old Q.
                _fetch_key_block(k, k_s, k_full, k_empty, 5, blocks_before, [batch_row, row, hk, 0], NWG, NST, NAMED)
                for w in gl.static_range(NWG):
                    where = [batch_row, q_start + start_m + w * 64, h, 0]
                    mbarrier.wait(q_empty.index(w), (queries_before & 1) ^ 1)
                    if dout is None:
                        mbarrier.expect(q_full.index(w), q.block_type.nbytes)
                    else:
                        mbarrier.expect(q_full.index(w), q.block_type.nbytes + dout.block_type.nbytes)
                        tma_load(dout, where, q_full.index(w), do_s.index(w))
                    tma_load(q, where, q_full.index(w), q_s.index(w))
                queries_before += 1
        # Which tile comes next, and where it is, takes more than 1000 clocks: now, while there is work for more.
        if again >= 0:
            tile, more, again = again, 2, -1
        else:
            tile = gl.atomic_add(counter, 1, sem="relaxed") + programs
            more = 1
        b, h, start_m, q_start, q_rows, used_q, used_k, k_start = _locate(
            tile, sides, batch, num_heads, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M
        )
        for n in range(count):
            row = rows + key_block(n, first, count, on_the_right, on_the_left, HAS_LEFT) * BLOCK_N
            next_row = rows + key_block(n + 1, first, count, on_the_right, on_the_left, HAS_LEFT) * BLOCK_N
            # In the order in which there is room: of the forward pass V is the last to be read, of dQ it is K.
            if dout is not None:
                where = [batch_row, row, hk, 0]
                _fetch_key_block(v, v_s, v_full, v_empty, 12, blocks_before, where, NWG, NSTV, NAMED)
            if n + 1 < count:
                where = [batch_row, next_row, hk, 0]
                _fetch_key_block(k, k_s, k_full, k_empty, 5, blocks_before + 1, where, NWG, NST, NAMED)
            if dout is None:
                where = [batch_row, row, hk, 0]
                _fetch_key_block(v, v_s, v_full, v_empty, 12, blocks_before, where, NWG, NSTV, NAMED)
            blocks_before += 1
        if FIRST_MAX:
            if tile >= num_tiles:
                for i in gl.static_range(2):
                    if (again < 0) & (tiles_before + i >= 2):
                        wait_for_room(notes, tiles_before + i)
                        if has_failed(notes, tiles_before + i, NWG):
                            again = sent_before if i == 0 else sent
                if again >= 0:
                    tile, more, again = again, 2, -1
                    b, h, start_m, q_start, q_rows, used_q, used_k, k_start = _locate(
                        tile, sides, batch, num_heads, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M
                    )
    wait_for_room(notes, tiles_before)
    send(notes, tiles_before, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if NAMED:  # leave no hardware barrier half full
        for i in gl.static_range(NST):
            if i < blocks_before:
                acquire(k_empty, NST + i, 5, NWG, NST, NAMED)
        for i in gl.static_range(NSTV):
            if i < blocks_before:
                acquire(v_empty, NSTV + i, 12, NWG, NSTV, NAMED)
    _leave(counter, programs)


@gluon.jit
def _leave(counter, programs):
    """The last program to end leaves the counter as it found it, for the next launch on this stream."""
    if gl.atomic_add(counter + 1, 1, sem="relaxed") == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _locate_keys(tile, sides, batch, num_heads_kv, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M: gl.constexpr,
                 BLOCK_N: gl.constexpr):  # fmt: skip
    """Batch entry and K/V head of a tile of keys, its first key, of both sides of its sequence the start, the rows and
    the used lengths, and the sequence's first one among all tiles of rows."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sides
    tile = gl.minimum(tile, num_tiles - 1)
    if cu_seqlens_q is not None:
        # Forwards: the first block of a sequence has the most rows under a causal mask.
        b, block, k_start, k_rows = locate_tile(tile // num_heads_kv, cu_seqlens_k, batch, seqlen_k, BLOCK_N)
        hk = tile % num_heads_kv
        q_start, q_rows = other_side(b, cu_seqlens_q, batch, seqlen_q)
        first_tile = q_start // BLOCK_M + b
    else:
        # As in _locate: heads whose Q, dO and dQ share the L2 cache.
        num_n = gl.cdiv(seqlen_k, BLOCK_N)
        group = tile // (num_n * heads_together)
        member = tile % (num_n * heads_together)
        heads = gl.minimum(batch * num_heads_kv - group * heads_together, heads_together)
        block = member // heads
        b = (group * heads_together + member % heads) // num_heads_kv
        hk = (group * heads_together + member % heads) % num_heads_kv
        q_start, q_rows, k_start, k_rows = 0, seqlen_q, 0, seqlen_k
        first_tile = b * gl.cdiv(seqlen_q, BLOCK_M)
    used_q = used_length(seqused_q, b, batch, q_rows)
    used_k = used_length(seqused_k, b, batch, k_rows)
    return b, hk, block * BLOCK_N, q_start, used_q, used_k, k_start, k_rows, first_tile


@gluon.jit
def query_producer(
    q, k, v, dout, lse_delta, keys, ring, notes, counter, sides, batch, num_heads, group_size, seqlen_q, seqlen_k,
    num_tiles, heads_together, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NST: gl.constexpr,
    NSTO: gl.constexpr, NEED_V: gl.constexpr, APART: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """Of the backward pass: K and V of a tile once, and Q, dO, lse and delta block by block. APART: K and V by the
    warpgroups' halves."""
    k_s, v_s, kv_full, kv_empty = keys
    q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty = ring
    programs = gl.num_programs(0)
    num_heads_kv = num_heads // group_size
    blocks_before = 0
    tiles_before = 0
    keys_before = 0
    tile = gl.program_id(0)
    b, hk, start_n, q_start, used_q, used_k, k_start, k_rows, first_tile = _locate_keys(
        tile, sides, batch, num_heads_kv, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M, BLOCK_N
    )
    while tile < num_tiles:
        batch_row = b if sides[0] is None else 0
        first, count, low, high, turn = 0, 0, 0, 0, 0
        first_head = hk * group_size
        row = q_start
        first_tile_before = first_tile
        if start_n < k_rows:
            wait_for_room(notes, tiles_before)
            send(notes, tiles_before, 1, start_n, used_q, used_k, q_start, k_start, batch_row, hk, k_rows, first_tile)
            tiles_before += 1
            first, count, low, high, turn = query_blocks(start_n, used_q, used_k, left, right, BLOCK_M, BLOCK_N)
            if count > 0:
                mbarrier.wait(kv_empty, (keys_before & 1) ^ 1)
                PARTS: gl.constexpr = 2 if APART else 1
                mbarrier.expect(kv_full, PARTS * (k.block_type.nbytes + (v.block_type.nbytes if NEED_V else 0)))
                for i in gl.static_range(PARTS):
                    where = [batch_row, k_start + start_n + i * 64, hk, 0]
                    tma_load(k, where, kv_full, k_s.index(i))
                    if NEED_V:
                        tma_load(v, where, kv_full, v_s.index(i))
                keys_before += 1
        tile = gl.atomic_add(counter, 1, sem="relaxed") + programs
        b, hk, start_n, q_start, used_q, used_k, k_start, k_rows, first_tile = _locate_keys(
            tile, sides, batch, num_heads_kv, seqlen_q, seqlen_k, num_tiles, heads_together, BLOCK_M, BLOCK_N
        )
        for member in range(group_size if count > 0 else 0):
            h = first_head + member
            for n in range(count):
                block = first + query_block(n, count, low, high, turn)
                start_m = block * BLOCK_M
                lse_row = ((first_tile_before + block) * num_heads + h) * (2 * BLOCK_M)
                stage = blocks_before % NST
                acquire(q_empty, blocks_before, 5, 2, NST, NAMED)
                mbarrier.expect(q_full.index(stage), q.block_type.nbytes + BLOCK_M * 4)
                tma_load(lse_delta, [lse_row], q_full.index(stage), lse_s.index(stage))
                tma_load(q, [batch_row, row + start_m, h, 0], q_full.index(stage), q_s.index(stage))
                stage = blocks_before % NSTO
                acquire(do_empty, blocks_before, 12, 2, NSTO, NAMED)
                mbarrier.expect(do_full.index(stage), dout.block_type.nbytes + BLOCK_M * 4)
                tma_load(lse_delta, [lse_row + BLOCK_M], do_full.index(stage), delta_s.index(stage))
                tma_load(dout, [batch_row, row + start_m, h, 0], do_full.index(stage), do_s.index(stage))
                blocks_before += 1
    wait_for_room(notes, tiles_before)
    send(notes, tiles_before, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if NAMED:  # leave no hardware barrier half full
        for i in gl.static_range(NST):
            if i < blocks_before:
                acquire(q_empty, NST + i, 5, 2, NST, NAMED)
        for i in gl.static_range(NSTO):
            if i < blocks_before:
                acquire(do_empty, NSTO + i, 12, 2, NSTO, NAMED)
    _leave(counter, programs)
