"""Tile tables of the `fa2` backend: which block sizes run where.

A tile changes speed and rounding, never meaning. A row serves head dimensions up to its ``largest``; the first row that
reaches the problem's wins. The sm_90 rows were measured with tools/tune.py on an H200 (torch 2.11, Triton 3.6.0,
2026-11-30; see docs/notes/fa2.md); the others are chosen so that they fit shared memory and do not spill much (compile
checks), and are not tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from ...problem import AttentionProblem
from ...target import Target


@dataclass(frozen=True)
class Tile:
    """block_m query rows by block_n keys. ``max_registers`` for each thread, on NVIDIA."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True)
class BwdTile:
    """Tiles of the two backward passes: dkdv keeps block_n keys and walks over rows, dq the other way round."""

    dkdv: Tile
    dq: Tile


AnyTile = TypeVar("AnyTile", Tile, BwdTile)


@dataclass(frozen=True)
class Row(Generic[AnyTile]):
    """The tile for head dimensions up to ``largest``; ``masked`` under a causal mask or a window, if that differs."""

    largest: int
    tile: AnyTile
    masked: AnyTile | None = None


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


# 16-bit inputs.
FORWARD: dict[str, tuple[Row[Tile], ...]] = {
    "sm90": (
        Row(64, Tile(128, 64, 4, 3), masked=Tile(128, 64, 8, 3)),
        Row(128, Tile(128, 128, 8, 3), masked=Tile(64, 64, 4, 3)),
        Row(256, Tile(128, 32, 8, 3)),
    ),
    "sm100": (Row(64, Tile(128, 64, 4, 3)), Row(128, Tile(128, 64, 8, 2)), Row(256, Tile(64, 64, 4, 2))),
    "sm80": (Row(64, Tile(128, 64, 4, 3)), Row(128, Tile(128, 32, 4, 3)), Row(256, Tile(64, 32, 4, 2))),
    "sm86": (Row(64, Tile(128, 64, 4, 2)), Row(128, Tile(64, 32, 4, 2)), Row(256, Tile(32, 32, 4, 1))),
    "sm75": (Row(64, Tile(32, 32, 4, 1)), Row(128, Tile(32, 16, 4, 1)), Row(256, Tile(16, 16, 4, 1))),
    "hip": (Row(64, Tile(128, 64, 4, 1)), Row(128, Tile(128, 32, 4, 1)), Row(256, Tile(64, 32, 4, 1))),
    "interpreter": (Row(256, Tile(64, 64, 4, 1)),),
}
BACKWARD: dict[str, tuple[Row[BwdTile], ...]] = {
    "sm90": (
        Row(64, BwdTile(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3, max_registers=168))),  # three programs fit an SM
        Row(
            128,
            BwdTile(Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
            masked=BwdTile(Tile(32, 64, 4, 3), Tile(128, 64, 8, 3)),
        ),
        Row(256, BwdTile(Tile(32, 64, 8, 2), Tile(128, 32, 8, 1))),
    ),
    "sm100": (
        Row(64, BwdTile(Tile(64, 128, 8, 2), Tile(128, 64, 8, 2))),
        Row(128, BwdTile(Tile(64, 64, 8, 1), Tile(64, 64, 8, 1))),
        Row(256, BwdTile(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))),
    ),
    "sm80": (
        Row(64, BwdTile(Tile(32, 128, 4, 2), Tile(128, 32, 4, 2))),
        Row(128, BwdTile(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))),
        Row(256, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
    ),
    "sm86": (
        Row(64, BwdTile(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))),
        Row(128, BwdTile(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))),
        Row(256, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
    ),
    "sm75": (
        Row(64, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
        Row(128, BwdTile(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))),
        Row(256, BwdTile(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))),
    ),
    "hip": (
        Row(64, BwdTile(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))),
        Row(128, BwdTile(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1))),
        Row(256, BwdTile(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))),
    ),
    "interpreter": (Row(256, BwdTile(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))),),
}

# For 32-bit inputs, whose "ieee" products run unrolled on the FMA units (large tiles spill and compile for minutes),
# and for rows that are not aligned to 16 bytes. Those load element by element, and at large tiles on sm_90 ptxas 12.8
# runs out of uniform registers for their addresses and overwrites matrix descriptors: wrong results (seen at D 40,
# Dv 24). Below 64 rows Triton uses mma.sync, which has no descriptors.
FORWARD_SMALL: tuple[Row[Tile], ...] = (
    Row(64, Tile(32, 32, 4, 1)),
    Row(128, Tile(32, 32, 8, 1)),
    Row(256, Tile(16, 16, 8, 1)),
)
BACKWARD_SMALL: tuple[Row[BwdTile], ...] = (
    Row(64, BwdTile(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))),
    Row(128, BwdTile(Tile(16, 32, 8, 1), Tile(32, 16, 8, 1))),
    Row(256, BwdTile(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))),
)

# Where scores have biases, masks, slopes or dropout, in place of the larger tiles, which would spill. Not tuned.
FORWARD_TERMS: tuple[Row[Tile], ...] = (Row(128, Tile(64, 64, 4, 2)), Row(256, Tile(64, 32, 8, 1)))
BACKWARD_TERMS: tuple[Row[BwdTile], ...] = (
    Row(64, BwdTile(Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))),
    Row(128, BwdTile(Tile(32, 64, 8, 2), Tile(64, 32, 4, 2))),
    Row(256, BwdTile(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))),
)
_WITH_LARGE_TILES = ("sm90", "sm100")


def forward_tile(problem: AttentionProblem, target: Target, vectorised: bool = True) -> Tile:
    """``vectorised``: all rows start on 16 bytes."""
    return _choose(_table(FORWARD, FORWARD_SMALL, FORWARD_TERMS, problem, target, vectorised), problem)


def backward_tile(problem: AttentionProblem, target: Target, vectorised: bool = True) -> BwdTile:
    return _choose(_table(BACKWARD, BACKWARD_SMALL, BACKWARD_TERMS, problem, target, vectorised), problem)


def _table(
    rows: dict[str, tuple[Row[AnyTile], ...]], small: tuple[Row[AnyTile], ...], terms: tuple[Row[AnyTile], ...],
    problem: AttentionProblem, target: Target, vectorised: bool,
) -> tuple[Row[AnyTile], ...]:  # fmt: skip
    if target.is_gpu and (problem.dtype.itemsize == 4 or not vectorised):
        return small
    has_terms = problem.has_terms or problem.dropout_threshold > 0
    return terms if has_terms and family(target) in _WITH_LARGE_TILES else rows[family(target)]


def _choose(rows: tuple[Row[AnyTile], ...], problem: AttentionProblem) -> AnyTile:
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    row = next(row for row in rows if dim <= row.largest)
    masked = problem.window_left is not None or problem.window_right is not None
    return row.masked if masked and row.masked is not None else row.tile
