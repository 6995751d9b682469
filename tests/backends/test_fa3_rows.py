"""The kernels around `fa3`'s backward, in Triton's interpreter or on a GPU: where lse, delta and dQ of a row are.

What is expected is worked out row by row from how a warpgroup holds a tile in registers. Where the copy engine adds dQ,
its sum has no order of its own.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("runs kernels", allow_module_level=True)

from speedlight.backends import fa3
from speedlight.backends.fa2.tiles import block_dim
from speedlight.backends.fa3.tiles import BwdTile
from speedlight.backends.layout import tiles_of
from speedlight.problem import describe

HEADS, LENGTHS = 2, (37, 0, 130, 64, 5)  # and 20 rows after the last sequence


def order_of_dq(block_m, block_d):
    """Where element (row, column) of a tile is: by half, 8 columns, thread, row modulo 16 // 8, and odd column."""
    row, column = torch.arange(block_m)[:, None], torch.arange(block_d)[None]
    width = block_d // 2 if block_m == 64 else block_d
    half = column // width if block_m == 64 else row // 64
    row, column = row % 64, column % width
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return half * 64 * width + column // 8 * 512 + thread * 4 + row % 16 // 8 * 2 + column % 2


BY_THREADS_128, BY_THREADS_64, BULK = BwdTile(128), BwdTile(64), BwdTile(64, start_at_lse=True, bulk_dq=True)


@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(64, BY_THREADS_128), (40, BY_THREADS_128), (16, BY_THREADS_64), (72, BY_THREADS_64), (128, BY_THREADS_64),
     (72, BULK), (128, BULK)],
)  # fmt: skip
@pytest.mark.parametrize("varlen", [False, True])
def test_lse_delta_and_dq_of_each_row(varlen, head_dim, tile, device):
    lead = (sum(LENGTHS) + 20,) if varlen else (2, 200)
    q, out, dout = (torch.randn(*lead, HEADS, head_dim, device=device, dtype=torch.float16) for _ in range(3))
    cu = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    problem, _ = describe(q, q, q, *((cu, cu) if varlen else ()))
    lse, dlse = torch.randn(2, *problem.lse_shape, device=device)
    block_m, block_d = tile.block_m, block_dim(head_dim)
    tiles = tiles_of(problem, problem.seqlen_q, block_m) * HEADS
    dq_sum = torch.randn(tiles, block_m, block_d, device=device)
    if tile.bulk_dq:
        in_order = torch.randn(q.shape, device=device)
    else:
        in_order = torch.empty(tiles, block_m * block_d, device=device)
        in_order[:, order_of_dq(block_m, block_d).flatten()] = dq_sum.flatten(1)
    lse_delta = torch.full((tiles, 2, block_m), math.nan, device=device)
    dq = torch.full_like(q, math.nan)
    tensors = {"out": out, "dout": dout, "lse": lse, "dlse": dlse, "lse_delta": lse_delta, "dq_sum": in_order}
    tensors |= {"dq": dq, "cu_seqlens_q": cu} if varlen else {"dq": dq}

    def launch(record):
        record.kernel[record.grid](*record.bound(), num_warps=record.num_warps)

    cleared = torch.full_like(in_order, math.nan)
    launch(fa3.preprocess_launch(problem, tensors | {"dq_sum": cleared}, tile))
    launch(fa3.convert_launch(problem, tensors | {"dq_sum": cleared}, tile))
    assert dq.count_nonzero() == 0  # also where no sequence is
    launch(fa3.convert_launch(problem, tensors, tile))

    # As (rows, heads, ...), and the first tile and row of each sequence.
    flat = [t.flatten(0, -3).float() for t in (out, dout, dq)]
    flat += [t.reshape(-1, HEADS, lse.shape[-1]).transpose(1, 2).flatten(0, 1) for t in (lse, dlse)]
    if varlen:
        starts = cu.tolist()
        sequences = [
            (start // block_m + n, start, rows)
            for n, (start, rows) in enumerate(zip(starts, (*LENGTHS, 20), strict=True))
        ]
    else:
        sequences = [(n * -(-200 // block_m), n * 200, 200) for n in range(2)]
    for first_tile, start, rows in sequences:
        row = torch.arange(rows, device=device)
        of_tile = (first_tile + row // block_m)[:, None] * HEADS + torch.arange(HEADS, device=device)
        row_out, row_dout, row_dq, row_lse, row_dlse = (t[start : start + rows] for t in flat)
        if tile.bulk_dq:
            row_sum = in_order.flatten(0, -3)[start : start + rows]
        else:
            row_sum = dq_sum[of_tile, (row % block_m)[:, None], :head_dim]
        torch.testing.assert_close(row_dq, row_sum * problem.softmax_scale, rtol=2e-3, atol=2e-3)
        i = (row % block_m)[:, None]
        at = i // 16 * 16 + i % 8 // 2 * 4 + i // 8 % 2 * 2 + i % 2
        lse_factor = -1 / problem.softmax_scale if tile.start_at_lse else math.log2(math.e)
        torch.testing.assert_close(lse_delta[of_tile, 0, at], row_lse * lse_factor)
        delta_factor = -1 if tile.start_at_lse else 1
        row_delta = (row_out * row_dout).sum(-1) - row_dlse
        torch.testing.assert_close(lse_delta[of_tile, 1, at], delta_factor * row_delta, rtol=1e-3, atol=1e-3)
