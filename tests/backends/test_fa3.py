"""What `fa3` decides in whole numbers, without a GPU: which key blocks a tile reads, and which of them it masks.

The kernel's own functions run here on Python's integers, against a table of who sees whom.
"""

from __future__ import annotations

import itertools
from types import FunctionType, SimpleNamespace

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if target.interpreting():
    pytest.skip("Triton's interpreter does not run Gluon", allow_module_level=True)

from speedlight.backends import fa3, ranges
from speedlight.backends.fa3 import common
from speedlight.backends.fa3.tiles import TILES, forward_tile
from speedlight.problem import describe

_LANGUAGE = SimpleNamespace(
    minimum=min, where=lambda condition, a, b: a if condition else b, cdiv=lambda a, b: -(-a // b)
)  # fmt: skip


def on_integers(kernel_function):
    names = dict(gl=_LANGUAGE, key_range=ranges.key_range)
    return FunctionType(kernel_function.fn.__code__, names)


key_blocks, hides = on_integers(common.key_blocks), on_integers(common.hides)

LENGTHS = [
    (1, 1),
    (64, 64),
    (128, 128),
    (256, 256),
    (300, 300),
    (384, 384),
    (200, 456),
    (128, 512),
    (456, 200),
    (640, 130),
]
WINDOWS = [(None, None), (None, 0), (None, 40), (0, 0), (100, 0), (130, 70), (64, None)]


def problem_of(seqlen_q, seqlen_k, window, head_dim):
    q, k = (torch.empty(1, n, 1, head_dim, dtype=torch.bfloat16, device="meta") for n in (seqlen_q, seqlen_k))
    return describe(q, k, k, window=window)[0], q, k


def record_of(problem, q, k, tile):
    tensors = {"q": q, "k": k, "v": k, "out": q, "lse": torch.empty(problem.lse_shape, device="meta")}
    return fa3.forward_launch(problem, tensors, tile, 132)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.num_consumers}x64x{tile.block_n}")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_block_with_a_hidden_pair_is_masked_and_a_visible_pair_is_in_a_block(tile, window):
    for seqlen_q, seqlen_k in LENGTHS:
        problem, q, k = problem_of(seqlen_q, seqlen_k, window, 64)
        args = record_of(problem, q, k, tile).args
        left = problem.window_left if args["HAS_LEFT"] else ranges.UNLIMITED
        right = problem.window_right if args["HAS_RIGHT"] else ranges.UNLIMITED
        block_m, block_n = tile.block_m, tile.block_n
        padded = -(-seqlen_k // block_n) * block_n
        position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        key = torch.arange(padded)[None]
        visible = (key < seqlen_k) & (key >= position - (window[0] if window[0] is not None else padded + seqlen_q))
        visible &= key <= position + (window[1] if window[1] is not None else padded + seqlen_q)
        for start_m in range(0, seqlen_q, block_m):
            first, count = key_blocks(start_m, seqlen_q, seqlen_k, left, right, block_m, block_n)
            rows = visible[start_m : start_m + block_m]
            inside = torch.zeros_like(rows)
            inside[:, first * block_n : (first + count) * block_n] = True
            assert not (rows & ~inside).any(), (seqlen_q, seqlen_k, start_m)
            for n, row in itertools.product(range(count), range(start_m, min(start_m + block_m, seqlen_q), 64)):
                start_n = (first + count - 1 - n) * block_n
                if n == 0:
                    masked = args["MASK_FIRST"]
                else:
                    masked = args["MASK_ALL"] and hides(
                        start_n, row, seqlen_q, seqlen_k, left, right, args["HAS_LEFT"], block_n
                    )  # fmt: skip
                block = visible[row : min(row + 64, start_m + block_m), start_n : start_n + block_n]
                assert masked or block.all(), (seqlen_q, seqlen_k, row, start_n)


def test_plain_problems_are_not_masked_at_all_and_causal_ones_on_the_diagonal_only():
    for head_dim in (64, 128):
        problem, q, k = problem_of(512, 512, (None, None), head_dim)
        args = record_of(problem, q, k, forward_tile(problem)).args
        assert not (args["MASK_FIRST"] or args["MASK_ALL"])
        problem, q, k = problem_of(512, 512, (None, 0), head_dim)
        args = record_of(problem, q, k, forward_tile(problem)).args
        assert args["MASK_FIRST"] and not args["MASK_ALL"]


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(3, 3))])
def test_the_number_of_tiles_covers_every_row_of_packed_sequences(options):
    """As the producer walks: sequence b owns the tiles from cu[b] // BLOCK_M + b on."""
    cu = [0, 0, 5, 200, 200, 583, 900]
    q = torch.empty(1000, 3, 64, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(len(cu), dtype=torch.int32, device="meta")
    problem, inputs = describe(q, q, q, lengths, lengths, **options)
    tile = forward_tile(problem)
    tensors = {"q": q, "k": q, "v": q, "out": q, "lse": torch.empty(problem.lse_shape, device="meta")}
    record = fa3.forward_launch(problem, tensors, tile, 132)
    last = max(
        start // tile.block_m + b + (end - start - 1) // tile.block_m
        for b, (start, end) in enumerate(itertools.pairwise([*cu, 1000]))
        if end > start
    )
    assert record.args["num_tiles"] >= (last + 1) * problem.num_heads
    assert record.grid[0] == min(132, record.args["num_tiles"])
    assert inputs.cu_seqlens_q is lengths
