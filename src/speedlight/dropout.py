"""The dropout mask: a pure function keep(seed, b, h, i, j), the same on every backend, tile and pass.

The generator is Philox-2x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011, where 7 rounds is the fewest that passes BigCrush). It is counter based: no state, so a tile can be drawn
in any order. It is fixed for good, and kernels copy it bit for bit.

One call gives 64 bits, four 16-bit words, for four elements: rows r and r + 8 by columns c and c + 8. In the register
layouts of matrix instructions, of the scores and of their transpose alike, one thread holds both such rows and both
such columns, so a thread makes a group for itself and uses all of it: 7 multiplications for 4 elements. 32 bits an
element from Philox-4x32-10 would cost more than the tensor cores' work on that element.

    counter   c0 = (i without bit 3) xor counter_xor      c1 = j without bit 3
    word      w  = 2 * (bit 3 of i) + (bit 3 of j)        (x0, x1)[w >> 1] >> 16 * (w & 1) & 0xffff
    keep      where the word >= threshold (``AttentionProblem.dropout_threshold``)

The key and counter_xor come from (seed, b, h) by a one-to-one map of (b, h), so two heads can share their mask only if
their keys collide in 32 bits, and even then in another order of rows.

The formulas use *, >>, & and ^ on non-negative values only, so the functions below take Python ints or int64 tensors.
A product of two 32-bit values may wrap around in int64; its bits are still right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PHILOX_M = 0xD256D193
PHILOX_W = 0x9E3779B9
ROUNDS = 7
_LOW = 0xFFFFFFFF


def philox_2x32(x0: Any, x1: Any, key: Any) -> tuple[Any, Any]:
    """Two 32-bit words from a counter of two 32-bit words and a 32-bit key."""
    for _ in range(ROUNDS):
        product = x0 * PHILOX_M
        x0, x1 = (product >> 32 & _LOW) ^ key ^ x1, product & _LOW
        key = key + PHILOX_W & _LOW
    return x0, x1


def dropout_key(seed: Any, b: Any, h: Any) -> tuple[Any, Any]:
    """(key, counter_xor), two 32-bit words, of batch entry b and head h. ``seed`` is 64 bits wide, signed or not."""
    return philox_2x32(*philox_2x32(b, h, seed & _LOW), seed >> 32 & _LOW)


def keep_mask(seed: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, threshold: int) -> Tensor:
    """True where the element (b, h, i, j) is kept.

    Args:
        seed: one int64, on the indices' device.
        b, h, i, j: int64 index tensors that broadcast with each other; i and j count within the sequence.
        threshold: ``AttentionProblem.dropout_threshold``, 0 to 65535.
    """
    key, counter_xor = dropout_key(seed.reshape(()), b, h)
    x0, x1 = philox_2x32(i & ~8 ^ counter_xor, j & ~8, key)
    words = torch.where((i & 8).bool(), x1, x0) >> (j & 8) * 2
    return words & 0xFFFF >= threshold


def keep_tile(key: Tensor, counter_xor: Tensor, rows: tuple[int, int], keys: tuple[int, int], threshold: int) -> Tensor:
    """``keep_mask`` of a tile, each group drawn once.

    Args:
        key, counter_xor: from ``dropout_key``, of shape (B, H, 1, 1).
        rows, keys: half-open ranges.

    Returns:
        (B, H, rows, keys) bool.
    """
    # Cover the ranges by blocks of 16 = [bit 3] x [8 groups].
    first_row, first_key = rows[0] // 16, keys[0] // 16
    row_blocks, key_blocks = -(-rows[1] // 16) - first_row, -(-keys[1] // 16) - first_key
    eight = torch.arange(8, device=key.device)
    i = (torch.arange(first_row, first_row + row_blocks, device=key.device)[:, None] * 16 + eight).view(-1, 1)
    j = (torch.arange(first_key, first_key + key_blocks, device=key.device)[:, None] * 16 + eight).view(-1)
    words = philox_2x32(i ^ counter_xor, j, key)
    keep = torch.empty((*key.shape[:2], row_blocks, 2, 8, key_blocks, 2, 8), dtype=torch.bool, device=key.device)
    for row_bit in (0, 1):
        x = words[row_bit].view(*key.shape[:2], row_blocks, 8, key_blocks, 8)
        for key_bit in (0, 1):
            torch.ge(x >> 16 * key_bit & 0xFFFF, threshold, out=keep[:, :, :, row_bit, :, :, key_bit])
    keep = keep.view(*key.shape[:2], row_blocks * 16, key_blocks * 16)
    return keep[
        :, :, rows[0] - first_row * 16 : rows[1] - first_row * 16, keys[0] - first_key * 16 : keys[1] - first_key * 16
    ]
