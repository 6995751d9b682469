"""What `fa3` decides in whole numbers, without a GPU: which blocks a tile reads, and which of them it masks.

The kernel's own functions run here on Python's integers, against a table of who sees whom.
"""

from __future__ import annotations

import dataclasses
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
from speedlight.backends.contract import Needs
from speedlight.backends.fa3 import common
from speedlight.backends.fa3.tiles import TILES, BwdTile, DqTile, forward_tile
from speedlight.problem import describe

_NAMES = {
    "gl": SimpleNamespace(
        minimum=min, maximum=max, where=lambda condition, a, b: a if condition else b, cdiv=lambda a, b: -(-a // b)
    ),
    "key_range": ranges.key_range,
    "query_range": ranges.query_range,
    "full_query_range": ranges.full_query_range,
}  # fmt: skip
for _name in (
    "key_blocks", "hides", "seen_whole", "masked_blocks", "key_block", "blocks_to_first_max", "query_blocks",
    "query_block",
):  # fmt: skip
    _NAMES[_name] = FunctionType(getattr(common, _name).fn.__code__, _NAMES)
on_integers = SimpleNamespace(**_NAMES)

LENGTHS = [
    (1, 1),
    (1, 512),
    (129, 512),
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
WINDOWS = [
    (None, None),
    (None, 0),
    (None, 40),
    (0, 0),
    (100, 0),
    (130, 70),
    (64, None),
    (128, 0),
    (300, 0),
    (200, None),
    (256, 256),
]


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
            tile_args = seqlen_q, seqlen_k, left, right
            first, count = on_integers.key_blocks(start_m, *tile_args, block_m, block_n)
            rows = visible[start_m : start_m + block_m]
            inside = torch.zeros_like(rows)
            inside[:, first * block_n : (first + count) * block_n] = True
            assert not (rows & ~inside).any(), (seqlen_q, seqlen_k, start_m)
            has_left = args["HAS_LEFT"]
            edges = on_integers.masked_blocks(start_m, first, count, *tile_args, has_left, block_m, block_n)
            order = [on_integers.key_block(n, first, count, *edges, has_left) for n in range(count)]
            assert sorted(order) == list(range(first, first + count))
            assert order[:1] == [first + count - 1][:count]  # which the kernel takes for granted
            for row in range(start_m, min(start_m + block_m, seqlen_q), 64):
                with_maxima = count
                if args["FIRST_MAX"]:
                    with_maxima = on_integers.blocks_to_first_max(
                        row, first, count, seqlen_q, seqlen_k, right, *edges, has_left, block_n
                    )  # fmt: skip
                found = torch.zeros_like(visible[row : row + 64, 0])
                for n, start_n in enumerate(block * block_n for block in order):
                    block = visible[row : row + 64, start_n : start_n + block_n]
                    if n == 0:
                        masked = args["MASK_FIRST"]
                        # Of a diagonal block the first warpgroup takes the first half, and of that a quarter.
                        columns = (block_n // 4, block_n // 8)[args["DIAGONAL"] and row == start_m]
                        found |= block[:, : columns if args["FIRST_MAX"] else block_n].any(1)
                        if args["DIAGONAL"]:
                            near, far = block[:, : block_n // 2], block[:, block_n // 2 :]
                            assert not far.any() if row == start_m else near.all()
                    elif n < with_maxima:
                        masked = args["MASK_ALL"] and on_integers.hides(start_n, row, *tile_args, has_left, block_n)
                        found |= block.any(1)
                    else:
                        masked = False
                        assert block.all() and found.all(), (seqlen_q, seqlen_k, row, start_n)
                    assert masked or block.all(), (seqlen_q, seqlen_k, row, start_n)
                if args["FIRST_MAX"]:  # every row has a maximum by then that is not that of nothing
                    assert (found == visible[row : row + 64].any(1)).all(), (seqlen_q, seqlen_k, row)


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


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_backward_takes_every_block_of_rows_that_sees_a_key_and_masks_those_with_a_hidden_pair(block_m, window):
    block_n = 128
    for seqlen_q, seqlen_k in LENGTHS:
        problem, *_ = problem_of(seqlen_q, seqlen_k, window, 64)
        left, right = (ranges.UNLIMITED if w is None else w for w in (problem.window_left, problem.window_right))
        rows, keys = (-(-n // block) * block for n, block in ((seqlen_q, block_m), (seqlen_k, block_n)))
        row, key = torch.arange(rows)[:, None], torch.arange(keys)[None]
        position = row + seqlen_k - seqlen_q
        visible = (row < seqlen_q) & (key < seqlen_k) & (key >= position - left) & (key <= position + right)
        for start_n in range(0, seqlen_k, block_n):
            first, *edges, turn = on_integers.query_blocks(start_n, seqlen_q, seqlen_k, left, right, block_m, block_n)
            count, low, high = edges
            order = [first + on_integers.query_block(n, count, low, high, turn) for n in range(count)]
            assert sorted(order) == list(range(first, first + count))
            for block in range(rows // block_m):
                pairs = visible[block * block_m : (block + 1) * block_m, start_n : start_n + block_n]
                if block not in order:
                    assert not pairs.any(), (seqlen_q, seqlen_k, start_n, block)
                elif order.index(block) >= low + high:
                    assert pairs.all(), (seqlen_q, seqlen_k, start_n, block)


@pytest.mark.parametrize("tile", [DqTile(128, 2, 2), DqTile(64, 3, 2)], ids=lambda tile: f"128x{tile.block_n}")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_dq_apart_takes_every_block_of_keys_and_masks_those_with_a_hidden_pair(tile, window):
    for seqlen_q, seqlen_k in LENGTHS:
        problem, q, k = problem_of(seqlen_q, seqlen_k, window, 64)
        lse_delta = torch.empty(1024, device="meta")
        tensors = {"q": q, "k": k, "v": k, "dout": q, "dq": q, "lse_delta": lse_delta}
        args = fa3.dq_launch(problem, tensors, tile, 64, 132).args
        left, right = (ranges.UNLIMITED if w is None else w for w in (problem.window_left, problem.window_right))
        padded = -(-seqlen_k // tile.block_n) * tile.block_n
        position, key = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(padded)[None]
        visible = (key < seqlen_k) & (key >= position - left) & (key <= position + right)
        for start_m in range(0, seqlen_q, tile.block_m):
            tile_args = seqlen_q, seqlen_k, left, right
            first, count = on_integers.key_blocks(start_m, *tile_args, tile.block_m, tile.block_n)
            has_left = args["HAS_LEFT"]
            edges = on_integers.masked_blocks(
                start_m, first, count, *tile_args, has_left, tile.block_m, tile.block_n
            )  # fmt: skip
            order = [on_integers.key_block(n, first, count, *edges, has_left) for n in range(count)]
            assert sorted(order) == list(range(first, first + count))
            assert order[:1] == [first + count - 1][:count]  # which the kernel takes for granted
            rows = visible[start_m : start_m + tile.block_m]
            for block in range(padded // tile.block_n):
                pairs = rows[:, block * tile.block_n : (block + 1) * tile.block_n]
                if block not in order:
                    assert not pairs.any(), (seqlen_q, seqlen_k, start_m, block)
                elif not args["MASKS"] or order.index(block) >= max(sum(edges), 1):
                    assert pairs.all(), (seqlen_q, seqlen_k, start_m, block)


@pytest.mark.parametrize("head_dim", [20, 24])
def test_gradients_of_rows_that_tma_cannot_store_are_left_to_fa2(head_dim, monkeypatch):
    """q, k and v may be aligned by the strides of what they are views of; dq and dk are not."""
    q = torch.empty(1, 64, 2, 32, dtype=torch.bfloat16)[..., :head_dim]
    v = torch.empty(1, 64, 2, 32, dtype=torch.bfloat16)
    problem, inputs = describe(q, q, v)
    called = []
    monkeypatch.setattr(fa3, "OWN_BACKWARD", True)
    monkeypatch.setattr(fa3, "_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(fa3.launch, "run", lambda key, *rest: called.append(key[0]))
    fa3.backward(problem, inputs, v, torch.empty(1, 2, 64), v, None, Needs())
    assert called == ["fa2.backward" if head_dim % 8 else "fa3.backward"]


@pytest.mark.parametrize(
    ("options", "starts"),
    [({}, True), ({"softmax_scale": -0.1}, True), ({"softmax_scale": 0.0}, False), ({"softmax_scale": 1e-46}, False),
     ({"softmax_scale": float("inf")}, False), ({"softcap": 5.0}, False)],
)  # fmt: skip
def test_scores_start_at_lse_only_where_it_can_be_divided_by_the_scale(options, starts):
    q = torch.empty(1, 64, 1, 128, dtype=torch.bfloat16, device="meta")
    problem, _ = describe(q, q, q)
    problem = dataclasses.replace(problem, **options)
    lse_delta = torch.empty(128, device="meta")
    tensors = {"q": q, "k": q, "v": q, "dout": q, "dk": q, "dv": q, "lse_delta": lse_delta}
    tile = BwdTile(64, start_at_lse=True, bulk_dq=True)
    before, main = fa3.preprocess_launch(problem, tensors, tile), fa3.backward_launch(problem, tensors, tile, 132)
    assert before.args["START"] == main.args["START"] == starts
