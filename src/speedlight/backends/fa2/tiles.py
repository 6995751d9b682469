"""Tile tables of the `fa2` backend: which block sizes run where.

A tile changes speed and rounding, never meaning. Rows are keyed by (architecture family, bytes per element, head
dimension up to); the first fitting row wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ...problem import AttentionProblem
from ...target import Target


@dataclass(frozen=True)
class Tile:
    """block_m query rows by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class BwdTile:
    """Tiles of the two backward passes: dkdv keeps block_n keys and walks over rows, dq the other way round."""

    dkdv: Tile
    dq: Tile


def block_dim(dim: int) -> int:
    """A head dimension as it sits in a tile: the next power of two, at least 16 (the least a matrix unit takes)."""
    return max(16, 1 << (dim - 1).bit_length())


def family(target: Target) -> str:
    """Architectures that share tile rows."""
    if target.kind != "cuda":
        return target.kind
    assert isinstance(target.arch, int)
    if target.arch == 90:
        return "sm90"
    if target.arch in (100, 103):
        return "sm100"
    if target.arch in (80, 87):
        return "sm80"
    return "sm75" if target.arch < 80 else "sm86"  # sm86, sm89 and sm120 share the 99 KiB limit


# (family, largest head dimension) -> tile, for 16-bit inputs.
_FWD: dict[str, tuple[tuple[int, Tile], ...]] = {
    "sm90": ((64, Tile(128, 64, 4, 3)), (128, Tile(128, 128, 8, 3)), (256, Tile(64, 64, 4, 2))),
    "sm100": ((64, Tile(128, 64, 4, 3)), (128, Tile(128, 64, 8, 2)), (256, Tile(64, 64, 4, 2))),
    "sm80": ((64, Tile(128, 64, 4, 3)), (128, Tile(128, 32, 4, 3)), (256, Tile(64, 32, 4, 2))),
    "sm86": ((64, Tile(128, 64, 4, 2)), (128, Tile(64, 32, 4, 2)), (256, Tile(32, 32, 4, 1))),
    "sm75": ((64, Tile(32, 32, 4, 1)), (128, Tile(32, 16, 4, 1)), (256, Tile(16, 16, 4, 1))),
    "hip": ((64, Tile(128, 64, 4, 1)), (128, Tile(128, 32, 4, 1)), (256, Tile(64, 32, 4, 1))),
    "interpreter": ((256, Tile(64, 64, 4, 1)),),
}
_BWD: dict[str, tuple[tuple[int, BwdTile], ...]] = {
    "sm90": (
        (64, BwdTile(Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))),
        (128, BwdTile(Tile(64, 128, 8, 3), Tile(128, 64, 8, 3))),
        (256, BwdTile(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))),
    ),
    "sm100": (
        (64, BwdTile(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2))),
        (128, BwdTile(Tile(64, 64, 8, 1), Tile(64, 64, 8, 1))),
        (256, BwdTile(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))),
    ),
    "sm80": (
        (64, BwdTile(Tile(32, 128, 4, 2), Tile(128, 32, 4, 2))),
        (128, BwdTile(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))),
        (256, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
    ),
    "sm86": (
        (64, BwdTile(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))),
        (128, BwdTile(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))),
        (256, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
    ),
    "sm75": (
        (64, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
        (128, BwdTile(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))),
        (256, BwdTile(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))),
    ),
    "hip": (
        (64, BwdTile(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))),
        (128, BwdTile(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))),
        (256, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
    ),
    "interpreter": ((256, BwdTile(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))),),
}


# 32-bit inputs, on every GPU. "ieee" products run on the FMA units, fully unrolled: large tiles spill and compile for
# minutes.
_FWD_32BIT = ((64, Tile(64, 32, 8, 1)), (128, Tile(32, 32, 8, 1)), (256, Tile(16, 16, 8, 1)))
_BWD_32BIT = (
    (64, BwdTile(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))),
    (128, BwdTile(Tile(16, 32, 8, 1), Tile(32, 16, 8, 1))),
    (256, BwdTile(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))),
)


def forward_tile(problem: AttentionProblem, target: Target) -> Tile:
    wide = problem.dtype.itemsize == 4 and target.is_gpu
    return _row(_FWD_32BIT if wide else _FWD[family(target)], problem)


def backward_tile(problem: AttentionProblem, target: Target) -> BwdTile:
    wide = problem.dtype.itemsize == 4 and target.is_gpu
    return _row(_BWD_32BIT if wide else _BWD[family(target)], problem)


_AnyTile = TypeVar("_AnyTile", Tile, BwdTile)


def _row(rows: tuple[tuple[int, _AnyTile], ...], problem: AttentionProblem) -> _AnyTile:
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    return next(tile for largest, tile in rows if dim <= largest)
