"""Work and traffic of exact attention: floating-point operations, bytes moved through HBM by each algorithm, floors.

Counts are exact for causal and windowed masks, packed sequences and Dv != D. Traffic is what the algorithms as
published load and store, so it is an upper figure for a GPU whose L2 cache catches repeated reads.

Legend: M on-chip memory in elements; Sq, Sk lengths; D, Dv head dimensions; Bc, Br key and query block sizes.

Sources:
    FA-1: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention" (2022), arXiv:2205.14135
    FA-2: Dao, "FlashAttention-2" (2023), arXiv:2307.08691
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Any

STATISTIC_BYTES = 4  # lse, row maximum, row sum and delta are fp32 in every implementation
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Workload:
    """The sizes that work and traffic depend on.

    ``lengths`` holds (seqlen_q, seqlen_k) of every sequence; a dense batch repeats one pair. Queries stand at
    i + Sk - Sq and see keys from position - window_left to position + window_right; None is unlimited.
    """

    lengths: tuple[tuple[int, int], ...]
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    window_left: int | None = None
    window_right: int | None = None
    itemsize: int = 2  # bytes per element of q, k, v and out

    @classmethod
    def dense(cls, batch: int, seqlen_q: int, seqlen_k: int, num_heads: int, head_dim: int, **options: Any) -> Workload:
        """A batch of equal sequences; options as for :meth:`packed`."""
        return cls.packed(((seqlen_q, seqlen_k),) * batch, num_heads, head_dim, **options)

    @classmethod
    def packed(
        cls, lengths: tuple[tuple[int, int], ...], num_heads: int, head_dim: int, *, num_heads_kv: int | None = None,
        head_dim_v: int | None = None, causal: bool = False, window: Window = (None, None), itemsize: int = 2,
    ) -> Workload:  # fmt: skip
        left, right = window
        return cls(
            tuple(lengths), num_heads, num_heads if num_heads_kv is None else num_heads_kv, head_dim,
            head_dim if head_dim_v is None else head_dim_v, left, 0 if causal else right, itemsize,
        )  # fmt: skip

    @classmethod
    def of(cls, problem: Any) -> Workload:
        """From a dense AttentionProblem. A varlen problem does not know its lengths: use :meth:`packed`.

        A tensor mask or mask function hides pairs that are counted here as visible.
        """
        if problem.varlen:
            raise ValueError("a varlen problem holds no sequence lengths: use Workload.packed(lengths, ...)")
        return cls(
            ((problem.seqlen_q, problem.seqlen_k),) * problem.batch, problem.num_heads, problem.num_heads_kv,
            problem.head_dim, problem.head_dim_v, problem.window_left, problem.window_right, problem.dtype.itemsize,
        )  # fmt: skip


def visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int | None = None, window_right: int | None = None) -> int:
    """Number of (query, key) pairs of one sequence that the window lets through."""
    upto = seqlen_q * seqlen_k if window_right is None else _pairs_upto(seqlen_q, seqlen_k, window_right)
    return upto - (0 if window_left is None else _pairs_upto(seqlen_q, seqlen_k, -window_left - 1))


def _pairs_upto(seqlen_q: int, seqlen_k: int, offset: int) -> int:
    """Pairs with key <= position + offset: the sum over queries of position + offset + 1, held within 0 and Sk."""
    first = seqlen_k - seqlen_q + offset + 1

    def below(n: int) -> int:  # sum of min(t, Sk) over 0 <= t < n
        inside = min(max(n, 0), seqlen_k + 1)
        return inside * (inside - 1) // 2 + max(n - seqlen_k - 1, 0) * seqlen_k

    return below(first + seqlen_q) - below(first)


def total_pairs(w: Workload) -> int:
    """Visible pairs over all sequences and query heads."""
    counts = Counter(w.lengths)
    return w.num_heads * sum(n * visible_pairs(*pair, w.window_left, w.window_right) for pair, n in counts.items())


def forward_flops(w: Workload) -> int:
    """Multiplications and additions of Q K^T and P V: 2 (D + Dv) per visible pair, which is 4 D for Dv = D."""
    return 2 * (w.head_dim + w.head_dim_v) * total_pairs(w)


def backward_flops(w: Workload) -> int:
    """Recomputed Q K^T, dO V^T, P^T dO, dS K and dS^T Q: 2 (3 D + 2 Dv) per visible pair, 2.5 times the forward for
    Dv = D (the convention of FA-1 and FA-2)."""
    return 2 * (3 * w.head_dim + 2 * w.head_dim_v) * total_pairs(w)


def _rows(w: Workload) -> tuple[int, int]:
    return sum(q for q, _ in w.lengths), sum(k for _, k in w.lengths)


def minimal_forward_bytes(w: Workload) -> int:
    """Every input read once, out and lse written once."""
    rows_q, rows_k = _rows(w)
    q_side = rows_q * w.num_heads * ((w.head_dim + w.head_dim_v) * w.itemsize + STATISTIC_BYTES)
    return q_side + rows_k * w.num_heads_kv * (w.head_dim + w.head_dim_v) * w.itemsize


def minimal_backward_bytes(w: Workload) -> int:
    """q, k, v, out, dout and lse read once, dq, dk and dv written once."""
    rows_q, rows_k = _rows(w)
    q_side = rows_q * w.num_heads * ((2 * w.head_dim + 2 * w.head_dim_v) * w.itemsize + STATISTIC_BYTES)
    return q_side + rows_k * w.num_heads_kv * 2 * (w.head_dim + w.head_dim_v) * w.itemsize


def standard_forward_bytes(w: Workload) -> int:
    """S and P written and read in full: 4 Sq Sk + reading Q, K, V and writing O (FA-1, Algorithm 0; Theorem 2,
    section 3.2: Theta(N d + N^2)). A mask saves nothing."""
    d = w.head_dim + w.head_dim_v
    return w.num_heads * w.itemsize * sum(4 * q * k + (q + k) * d for q, k in w.lengths)


def standard_backward_bytes(w: Workload) -> int:
    """Five passes over P, dP or dS, of which dS = P * (dP - delta) moves three matrices (FA-1, Algorithm 3 and
    Theorem 5, appendix B.4)."""
    d = w.head_dim + w.head_dim_v
    return w.num_heads * w.itemsize * sum(7 * q * k + 2 * (q + k) * d for q, k in w.lengths)


def fa1_blocks(sram_bytes: int, head_dim: int, itemsize: int = 2) -> tuple[int, int]:
    """(block_m, block_n) for an on-chip memory: Bc = ceil(M / 4d), Br = min(Bc, d) (FA-1, Algorithm 1, line 1)."""
    block_n = ceil(sram_bytes // itemsize / (4 * head_dim))
    return min(block_n, head_dim), block_n


def fa1_forward_bytes(w: Workload, block_m: int, block_n: int) -> int:
    """Outer loop over K/V blocks; each query block it meets is loaded with O, m and l, and O, m and l are stored back
    (FA-1, Algorithm 1). With the blocks of :func:`fa1_blocks` that is Theta(N^2 d^2 / M) (Theorem 2, section 3.2)."""
    _, query_rows = _rows_met(w, block_m, block_n)
    met = (w.head_dim + 2 * w.head_dim_v) * w.itemsize + 4 * STATISTIC_BYTES
    kv = _rows(w)[1] * (w.head_dim + w.head_dim_v) * w.itemsize
    return w.num_heads * (kv + query_rows * met)


def fa1_backward_bytes(w: Workload, block_m: int, block_n: int) -> int:
    """Outer loop over K/V blocks that keep dK and dV on chip; each query block met loads Q, O, dO, dQ, l and m and
    stores dQ (FA-1, Algorithm 4, appendix B.4; Theta(N^2 d^2 / M) by Theorem 5)."""
    _, query_rows = _rows_met(w, block_m, block_n)
    met = (3 * w.head_dim + 2 * w.head_dim_v) * w.itemsize + 2 * STATISTIC_BYTES
    kv = _rows(w)[1] * 2 * (w.head_dim + w.head_dim_v) * w.itemsize
    return w.num_heads * (kv + query_rows * met)


def fa2_forward_bytes(w: Workload, block_m: int, block_n: int) -> int:
    """Outer loop over query blocks; Q is read and O and lse are written once, K and V once per query block that meets
    them (FA-2, Algorithm 1, section 3.1)."""
    key_rows, _ = _rows_met(w, block_m, block_n)
    d = (w.head_dim + w.head_dim_v) * w.itemsize
    return w.num_heads * (_rows(w)[0] * (d + STATISTIC_BYTES) + key_rows * d)


def fa2_backward_bytes(w: Workload, block_m: int, block_n: int, *, split: bool = False) -> int:
    """Delta from O and dO, then an outer loop over K/V blocks (FA-2, Algorithm 2, section 3.1).

    dQ is accumulated in fp32 in memory, read and written per visit. ``split`` is Speedlight's form: a second pass over
    query blocks makes dQ on chip and reads K and V again instead, without atomics.
    """
    key_rows, query_rows = _rows_met(w, block_m, block_n)
    rows_q, rows_k = _rows(w)
    d = (w.head_dim + w.head_dim_v) * w.itemsize
    delta = rows_q * (2 * w.head_dim_v * w.itemsize + STATISTIC_BYTES)
    dkdv = rows_k * 2 * d + query_rows * (d + 2 * STATISTIC_BYTES)
    if split:
        dq = rows_q * (d + w.head_dim * w.itemsize + 2 * STATISTIC_BYTES) + key_rows * d
    else:
        dq = query_rows * 2 * w.head_dim * 4
    return w.num_heads * (delta + dkdv + dq)


def _rows_met(w: Workload, block_m: int, block_n: int) -> tuple[int, int]:
    """Key rows loaded by a sweep over query blocks, and query rows loaded by a sweep over key blocks, all sequences,
    one head. Blocks without a visible pair are skipped."""
    key_rows = query_rows = 0
    for (seqlen_q, seqlen_k), n in Counter(w.lengths).items():
        shift = seqlen_k - seqlen_q
        key_rows += n * _sweep(seqlen_q, seqlen_k, block_m, block_n, shift, w.window_left, w.window_right)
        # Seen from the keys, the window is mirrored: key j meets queries from j - shift - right to j - shift + left.
        query_rows += n * _sweep(seqlen_k, seqlen_q, block_n, block_m, -shift, w.window_right, w.window_left)
    return key_rows, query_rows


def _sweep(
    rows: int, others: int, block: int, other_block: int, shift: int, left: int | None, right: int | None
) -> int:
    """Rows of the other side in blocks that a block of rows has a visible pair with, summed over the blocks of rows."""
    met = 0
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        first = 0 if left is None else max(start + shift - left, 0)
        last = others - 1 if right is None else min(stop - 1 + shift + right, others - 1)
        if first <= last:
            met += min((last // other_block + 1) * other_block, others) - first // other_block * other_block
    return met


def floor_seconds(flops: float, nbytes: float, peak_flops: float, bandwidth: float) -> float:
    """No version runs faster: the larger of flops over the arithmetic rate (FLOP/s) and bytes over bandwidth (B/s).

    Use measured ceilings; datasheet rates are not reached under a power limit.
    """
    return max(flops / peak_flops, nbytes / bandwidth)
