"""Tile table of the `fa3` backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FwdTile:
    """Of the forward: ``num_consumers`` warpgroups of 64 query rows each by block_n keys, ``num_stages`` blocks of K and
    V in shared memory. ``pingpong``: the warpgroups take turns in issuing. ``share_o``: out leaves through Q's memory.
    ``registers`` for each thread of the consumers (all but one) and of the producer."""

    num_consumers: int
    block_n: int
    num_stages: int
    pingpong: bool
    share_o: bool
    registers: tuple[int, int]

    @property
    def block_m(self) -> int:
        return 64 * self.num_consumers


# (largest head dimension, tile), by measured speed on an H200 (docs/notes/hopper-forward.md).
FORWARD: tuple[tuple[int, FwdTile], ...] = (
    (64, FwdTile(3, 128, 4, True, False, (160, 24))),
    (128, FwdTile(2, 128, 2, True, False, (240, 24))),
    (256, FwdTile(2, 64, 2, False, True, (240, 24))),
)


def forward_tile(block_d: int, block_dv: int) -> FwdTile:
    return next(tile for largest, tile in FORWARD if max(block_d, block_dv) <= largest)
