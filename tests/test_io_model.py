"""The counts of io_model against counting by brute force and against the papers' closed forms."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from speedlight import io_model
from speedlight.io_model import Workload

LENGTHS = [(1, 1), (5, 5), (3, 8), (8, 3), (16, 16), (0, 4), (4, 0), (13, 17)]
WINDOWS = [(None, None), (None, 0), (0, 0), (3, 0), (2, 4), (None, 2), (5, None), (100, 100)]


def visible(seqlen_q, seqlen_k, left, right):
    """The mask by its definition, as a set of (i, j)."""
    pairs = set()
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        position = i + seqlen_k - seqlen_q
        if (left is None or j >= position - left) and (right is None or j <= position + right):
            pairs.add((i, j))
    return pairs


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_visible_pairs(lengths, window):
    assert io_model.visible_pairs(*lengths, *window) == len(visible(*lengths, *window))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks", [(4, 4), (2, 8), (5, 3), (64, 64)])
def test_rows_met_by_blocks(blocks, window):
    """Rows loaded by both sweeps. Between a block's first and last visible neighbour every block is visible, so the
    range that is loaded is exactly the set of blocks with a visible pair."""
    block_m, block_n = blocks
    for seqlen_q, seqlen_k in LENGTHS:
        pairs = visible(seqlen_q, seqlen_k, *window)
        tiles = {(i // block_m, j // block_n) for i, j in pairs}
        key_rows = sum(min(block_n, seqlen_k - n * block_n) for _, n in tiles)
        query_rows = sum(min(block_m, seqlen_q - m * block_m) for m, _ in tiles)
        w = Workload(((seqlen_q, seqlen_k),), 1, 1, 8, 8, *window)
        met = io_model._rows_met(w, block_m, block_n)
        assert met == (key_rows, query_rows)


def test_flops_dense_and_mixed_head_dims():
    w = Workload.dense(2, 8, 8, 4, 16)
    assert io_model.forward_flops(w) == 4 * 2 * 4 * 8 * 8 * 16
    assert io_model.backward_flops(w) == 2.5 * io_model.forward_flops(w)
    causal = Workload.dense(2, 8, 8, 4, 16, causal=True)
    assert io_model.forward_flops(causal) == 4 * 2 * 4 * (8 * 9 // 2) * 16
    mixed = Workload.dense(1, 3, 5, 2, 16, head_dim_v=24)
    pairs = 2 * 3 * 5
    # One matrix product of (a, b) x (b, c) is 2abc operations.
    assert io_model.forward_flops(mixed) == 2 * pairs * 16 + 2 * pairs * 24
    assert io_model.backward_flops(mixed) == 2 * pairs * (16 + 24 + 24 + 16 + 16)


def test_flops_packed_equal_the_sum_of_sequences():
    lengths = ((7, 7), (3, 9), (0, 4), (7, 7))
    packed = Workload.packed(lengths, 4, 8, causal=True, window=(2, None))
    alone = [Workload.dense(1, q, k, 4, 8, causal=True, window=(2, None)) for q, k in lengths]
    for count in (
        io_model.forward_flops, io_model.backward_flops, io_model.minimal_forward_bytes,
        io_model.minimal_backward_bytes, io_model.standard_forward_bytes, io_model.standard_backward_bytes,
    ):  # fmt: skip
        assert count(packed) == sum(count(w) for w in alone)
    assert io_model.fa2_forward_bytes(packed, 4, 4) == sum(io_model.fa2_forward_bytes(w, 4, 4) for w in alone)


def test_minimal_bytes_are_the_tensors():
    batch, seqlen_q, seqlen_k, heads, heads_kv, d, dv = 2, 5, 7, 6, 3, 8, 4
    q, k = torch.empty(batch, seqlen_q, heads, d).half(), torch.empty(batch, seqlen_k, heads_kv, d).half()
    v, out = torch.empty(batch, seqlen_k, heads_kv, dv).half(), torch.empty(batch, seqlen_q, heads, dv).half()
    lse = torch.empty(batch, heads, seqlen_q)
    w = Workload.dense(batch, seqlen_q, seqlen_k, heads, d, num_heads_kv=heads_kv, head_dim_v=dv)
    assert io_model.minimal_forward_bytes(w) == sum(t.nbytes for t in (q, k, v, out, lse))
    # reads q k v out dout lse, writes dq dk dv
    assert io_model.minimal_backward_bytes(w) == sum(t.nbytes for t in (q, k, v, out, out, lse, q, k, v))


def test_standard_attention_by_its_steps():
    n, d, itemsize = 32, 8, 2
    w = Workload.dense(1, n, n, 1, d)
    nd, nn = n * d, n * n
    forward = (2 * nd + nn) + (2 * nn) + (nn + 2 * nd)  # S = QK^T; P = softmax(S); O = PV
    backward = (nn + 2 * nd) + (2 * nd + nn) + 3 * nn + (nn + 2 * nd) + (nn + 2 * nd)  # dV, dP, dS, dQ, dK
    assert io_model.standard_forward_bytes(w) == itemsize * forward
    assert io_model.standard_backward_bytes(w) == itemsize * backward


def test_fa1_by_running_its_loops():
    n, d, sram = 64, 8, 1024
    block_m, block_n = io_model.fa1_blocks(sram, d)
    assert (block_m, block_n) == (8, 16)  # M = 512 elements, 512 / 32 = 16, min(16, 8) = 8
    w = Workload.dense(1, n, n, 3, d)
    forward = backward = 0
    for _ in range(0, n, block_n):
        forward += 2 * block_n * d * 2
        backward += 4 * block_n * d * 2
        for _ in range(0, n, block_m):
            forward += block_m * (2 * d * 2 + 2 * 4) + block_m * (d * 2 + 2 * 4)
            backward += block_m * (4 * d * 2 + 2 * 4) + block_m * d * 2
    assert io_model.fa1_forward_bytes(w, block_m, block_n) == 3 * forward
    assert io_model.fa1_backward_bytes(w, block_m, block_n) == 3 * backward


def test_fa1_scales_as_the_theorem_says():
    """Theta(N^2 d^2 / M): four times for twice N, half for twice M (large N, statistics aside)."""
    d = 64

    def traffic(n, sram):
        return io_model.fa1_forward_bytes(Workload.dense(1, n, n, 1, d), *io_model.fa1_blocks(sram, d))

    assert traffic(16384, 1 << 16) / traffic(8192, 1 << 16) == pytest.approx(4, rel=0.02)
    assert traffic(16384, 1 << 15) / traffic(16384, 1 << 16) == pytest.approx(2, rel=0.02)
    standard = io_model.standard_forward_bytes(Workload.dense(1, 16384, 16384, 1, d))
    assert traffic(16384, 1 << 17) < standard


def test_fa2_by_running_its_loops():
    n, d, block_m, block_n = 24, 8, 8, 4
    w = Workload.dense(1, n, n, 1, d, causal=True)
    forward = dkdv = dq_atomic = dq_split = 0
    for m in range(n // block_m):
        forward += 2 * block_m * d * 2 + block_m * 4
        dq_split += 3 * block_m * d * 2 + 2 * block_m * 4
        for j in range(n // block_n):
            if j * block_n <= m * block_m + block_m - 1:
                forward += 2 * block_n * d * 2
                dq_split += 2 * block_n * d * 2
                dkdv += 2 * block_m * d * 2 + 2 * block_m * 4
                dq_atomic += 2 * block_m * d * 4
    dkdv += 4 * n * d * 2
    delta = 2 * n * d * 2 + n * 4
    assert io_model.fa2_forward_bytes(w, block_m, block_n) == forward
    assert io_model.fa2_backward_bytes(w, block_m, block_n) == delta + dkdv + dq_atomic
    assert io_model.fa2_backward_bytes(w, block_m, block_n, split=True) == delta + dkdv + dq_split


def test_floor_and_order_of_algorithms():
    assert io_model.floor_seconds(600e12, 1e9, 600e12, 4e12) == 1.0
    assert io_model.floor_seconds(1e9, 8e12, 600e12, 4e12) == 2.0
    w = Workload.dense(1, 4096, 4096, 16, 128)
    least, fa2 = io_model.minimal_forward_bytes(w), io_model.fa2_forward_bytes(w, 128, 64)
    # FA-1 needs large K/V blocks to beat standard attention: 128 keys do at D = 128, 64 do not.
    standard = io_model.standard_forward_bytes(w)
    assert least < fa2 < io_model.fa1_forward_bytes(w, 128, 128) < standard < io_model.fa1_forward_bytes(w, 128, 64)
    assert math.isclose(io_model.fa2_forward_bytes(w, 4096, 64), least)


def test_from_a_problem():
    problem = SimpleNamespace(
        varlen=False, batch=2, seqlen_q=4, seqlen_k=6, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=8,
        window_left=None, window_right=0, dtype=torch.float32,
    )  # fmt: skip
    assert Workload.of(problem) == Workload.dense(2, 4, 6, 4, 8, num_heads_kv=2, causal=True, itemsize=4)
    problem.varlen = True
    with pytest.raises(ValueError, match="packed"):
        Workload.of(problem)
