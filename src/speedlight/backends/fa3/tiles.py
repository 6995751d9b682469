"""Tile table of the `fa3` backend."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import AttentionProblem
from ..fa2.tiles import block_dim


@dataclass(frozen=True)
class FwdTile:
    """``num_consumers`` warpgroups of 64 query rows each by ``block_n`` keys, with ``num_stages`` blocks of K and of V
    in shared memory. ``registers`` for each thread of the consumers (all but one) and of the producer.

    pingpong: the warpgroups take turns in issuing products.
    q_in_registers: Q K^T takes Q from registers, not from shared memory.
    weights_first: exp2 of the scores stands before exp2 of the rescaling factors in the source. The sums are the same,
        ptxas's schedule is not.
    """

    num_consumers: int
    block_n: int
    num_stages: int
    registers: tuple[int, int]
    pingpong: bool = True
    q_in_registers: bool = False
    weights_first: bool = False
    first_max: bool = True

    def __post_init__(self) -> None:
        # One stage waits for itself, and hardware barriers are numbered for four stages and three turns.
        assert 2 <= self.num_stages <= 4 and self.num_consumers in (2, 3), self

    @property
    def block_m(self) -> int:
        return 64 * self.num_consumers


# By measured speed on an H200 (torch 2.11, Triton 3.6.0, 2026-11-30; docs/notes/hopper-forward.md).
_D64 = FwdTile(3, 128, 4, (160, 32))
_D64_SHORT_CAUSAL = FwdTile(2, 128, 4, (240, 32), q_in_registers=True, weights_first=True)
_D128 = FwdTile(2, 128, 2, (240, 32))
_D256 = FwdTile(2, 64, 2, (240, 32), pingpong=False)
TILES = (_D64, _D64_SHORT_CAUSAL, _D128, _D256)
SHORT = 4096  # keys


def forward_tile(problem: AttentionProblem) -> FwdTile:
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    if dim <= 64:
        masked = problem.window_left is not None or problem.window_right is not None
        return _D64_SHORT_CAUSAL if masked and problem.seqlen_k <= SHORT else _D64
    return _D128 if dim <= 128 else _D256
