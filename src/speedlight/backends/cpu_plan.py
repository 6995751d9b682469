"""How the cpu backend cuts a call: into parts that share nothing, and each part into tiles that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import AttentionProblem
from .contract import Inputs
from .ranges import UNLIMITED, full_key_range, key_range, seeing_rows, seen_keys

# A tile of scores is written once and then read or rewritten five to nine times, so a thread's share of it must stay in
# the core's L2 cache: elementwise passes over it take a third of the time (Xeon with 2 MiB of L2 a core, torch 2.13,
# B1 H8 D64, 2026-11-30).
SCORE_BYTES_PER_THREAD = 1024 * 1024
SCORE_BYTES_ON_GPU = 64 * 1024 * 1024
BLOCK_ROWS = 256  # rows of one matrix product: block_m for each query head that shares a K/V head
BLOCK_N = 512
ALIGN_N = 64


class Part(NamedTuple):
    """Some heads of some sequences, all of one length: a dense problem that shares nothing with the other parts."""

    batch: slice
    heads: slice
    heads_kv: slice
    seqlen_q: int
    seqlen_k: int
    start_q: int  # the sequence's first token in varlen, otherwise 0
    start_k: int
    seen_lo: int  # keys [seen_lo, seen_hi) are inside some row's window; no others are read
    seen_hi: int
    block_m: int
    block_n: int
    score_count: int  # of the largest tile

    @property
    def pairs(self) -> int:
        """(batch entry, K/V head) pairs, the batch of every matrix product."""
        return (self.batch.stop - self.batch.start) * (self.heads_kv.stop - self.heads_kv.start)


class Tile(NamedTuple):
    """Rows [m_lo, m_hi) by keys [n_lo, n_hi); ``full`` where the window hides nothing of it."""

    m_lo: int
    m_hi: int
    n_lo: int
    n_hi: int
    full: bool


def parts(problem: AttentionProblem, inputs: Inputs, buffers: int) -> Iterator[Part]:
    """The parts of a call whose tiles need ``buffers`` score buffers."""
    p = problem
    if p.batch == 0 or p.num_heads == 0:
        return
    if not p.varlen and not p.seqused_q and not p.seqused_k:
        yield from _split(p, range(p.batch), p.seqlen_q, p.seqlen_k, 0, 0, buffers)
        return
    if p.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the cpu backend reads sequence lengths on the host and cannot be captured in a CUDA graph; "
            "use a GPU backend, or pass neither cu_seqlens nor seqused"
        )
    starts_q, lengths_q = _lengths(p.batch, p.seqlen_q, inputs.cu_seqlens_q, inputs.seqused_q)
    starts_k, lengths_k = _lengths(p.batch, p.seqlen_k, inputs.cu_seqlens_k, inputs.seqused_k)
    for b in range(p.batch):
        yield from _split(p, range(b, b + 1), lengths_q[b], lengths_k[b], starts_q[b], starts_k[b], buffers)


def _lengths(batch: int, total: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> tuple[list[int], list[int]]:
    """First tokens and lengths of the sequences. On a GPU this synchronises."""
    starts, lengths = [0] * batch, [total] * batch
    if cu_seqlens is not None:
        bounds = cu_seqlens.clamp(0, total).tolist()
        starts, lengths = bounds[:-1], [max(hi - lo, 0) for lo, hi in pairwise(bounds)]
    if seqused is not None:
        lengths = [min(max(used, 0), n) for used, n in zip(seqused.tolist(), lengths, strict=True)]
    return starts, lengths


def _split(
    p: AttentionProblem, batch: range, seqlen_q: int, seqlen_k: int, start_q: int, start_k: int, buffers: int
) -> Iterator[Part]:
    """Cut sequences of one length into parts whose score tiles fit the cache."""
    if seqlen_q == 0:
        return
    on_cpu = p.device.type == "cpu"
    score_bytes = SCORE_BYTES_PER_THREAD * torch.get_num_threads() if on_cpu else SCORE_BYTES_ON_GPU
    budget = score_bytes // (p.lse_dtype.itemsize * buffers)
    seen_lo, seen_hi = seen_keys(seqlen_q, seqlen_k, *window_sizes(p))
    block_m = min(max(BLOCK_ROWS // p.group_size, 1), seqlen_q)
    rows = block_m * p.group_size
    block_n = max(min(BLOCK_N, seen_hi - seen_lo), 1)
    pairs = max(budget // (rows * block_n), 1)  # that fit at once
    if pairs >= len(batch) * p.num_heads_kv:  # all of them: spend the rest on longer tiles
        block_n = max(block_n, budget // (rows * len(batch) * p.num_heads_kv) // ALIGN_N * ALIGN_N)
        block_n = min(block_n, max(seen_hi - seen_lo, 1))
    heads_step = _even_step(p.num_heads_kv, pairs)
    batch_step = _even_step(len(batch), max(pairs // p.num_heads_kv, 1))
    for b in range(batch.start, batch.stop, batch_step):
        entries = slice(b, min(b + batch_step, batch.stop))
        for h in range(0, p.num_heads_kv, heads_step):
            heads_kv = slice(h, min(h + heads_step, p.num_heads_kv))
            heads = slice(heads_kv.start * p.group_size, heads_kv.stop * p.group_size)
            score_count = (entries.stop - b) * (heads_kv.stop - h) * rows * block_n
            yield Part(
                entries, heads, heads_kv, seqlen_q, seqlen_k, start_q, start_k, seen_lo, seen_hi,
                block_m, block_n, score_count,
            )  # fmt: skip


def _even_step(total: int, limit: int) -> int:
    """The step that cuts ``total`` into the fewest steps of at most ``limit``, all but equal."""
    steps = -(-total // limit)
    return -(-total // steps)


def window_sizes(problem: AttentionProblem) -> tuple[int, int]:
    """(left, right), as ranges.py wants them."""
    left, right = problem.window_left, problem.window_right
    return UNLIMITED if left is None else left, UNLIMITED if right is None else right


def row_blocks(problem: AttentionProblem, part: Part) -> Iterator[tuple[int, int, list[Tile]]]:
    """(m_lo, m_hi, tiles) for the blocks of rows that see any key. Other rows are never touched: whatever they hold,
    NaN included, stays out of every product."""
    window = part.seqlen_q, part.seqlen_k, *window_sizes(problem)
    first, last = seeing_rows(*window)
    for m_lo in range(first, last, part.block_m):
        m_hi = min(m_lo + part.block_m, last)
        lo, hi = key_range(m_lo, m_hi, *window)
        full_lo, full_hi = full_key_range(m_lo, m_hi, *window)
        step = min(-(-_even_step(hi - lo, part.block_n) // ALIGN_N) * ALIGN_N, part.block_n)
        bounds = [*range(lo, hi, step), hi]
        tiles = [Tile(m_lo, m_hi, n, n_hi, full_lo <= n and n_hi <= full_hi) for n, n_hi in pairwise(bounds)]
        yield m_lo, m_hi, tiles
