"""Tile table of the `fa3` backend."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import AttentionProblem
from ..fa2.tiles import block_dim

PRODUCER_REGISTERS = 32  # for each thread


@dataclass(frozen=True)
class FwdTile:
    """``num_consumers`` warpgroups of 64 query rows each by ``block_n`` keys, with ``num_stages`` blocks of K and of V
    in shared memory.

    pingpong: the warpgroups take turns in issuing products.
    q_in_registers: Q K^T takes Q from registers, not from shared memory.
    """

    num_consumers: int
    block_n: int
    num_stages: int
    pingpong: bool = True
    q_in_registers: bool = False

    def __post_init__(self) -> None:
        # One stage waits for itself, and hardware barriers are numbered for four stages and three turns.
        assert 2 <= self.num_stages <= 4 and self.num_consumers in (2, 3), self

    @property
    def block_m(self) -> int:
        return 64 * self.num_consumers

    @property
    def consumer_registers(self) -> int:
        """For each thread, of the 512 that a processor has for each thread of one warpgroup."""
        return (512 - PRODUCER_REGISTERS) // self.num_consumers


@dataclass(frozen=True)
class BwdTile:
    """``block_m`` query rows by 128 keys, of two warpgroups with 64 each, and ``num_stages`` blocks of Q and dO in
    shared memory.

    start_at_lse: S starts at -lse and dP at -delta, in the accumulators of their products.
    bulk_dq: dQ is added by the copy engine, from shared memory; else by the threads that hold it. For 64 rows only.
    apart: dK and dV are made by a launch each, for their columns do not fit in registers together.
    """

    block_m: int
    num_stages: int = 2
    block_n: int = 128
    start_at_lse: bool = False
    bulk_dq: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        # Hardware barriers are numbered for these.
        assert self.num_stages == 2 and self.block_m in (64, 128), self
        assert self.block_m == 64 or not self.bulk_dq, self

    @property
    def consumer_registers(self) -> int:
        return (512 - PRODUCER_REGISTERS) // 2


@dataclass(frozen=True)
class DqTile:
    """For dQ by itself: 128 query rows, of two warpgroups, by ``block_n`` keys, with ``num_stages`` blocks of K and
    ``num_stages_v`` of V in shared memory.

    own_staging: dQ goes out through shared memory of its own, not through Q's.
    operands_in_registers: of Q K^T and dO V^T the first ones.
    """

    block_n: int
    num_stages: int
    num_stages_v: int
    own_staging: bool = True
    operands_in_registers: bool = False

    @property
    def block_m(self) -> int:
        return 128

    @property
    def consumer_registers(self) -> int:
        return (512 - PRODUCER_REGISTERS) // 2


# By measured speed on an H200 (torch 2.11, Triton 3.6.0, 2026-11-30; docs/notes/hopper-forward.md).
_D64 = FwdTile(3, 128, 4)
_D64_SHORT = FwdTile(2, 128, 4, pingpong=False, q_in_registers=True)
_D128 = FwdTile(2, 128, 2)
_D256 = FwdTile(2, 64, 2, pingpong=False)
TILES = (_D64, _D64_SHORT, _D128, _D256)
_BWD_D64, _BWD_D128 = BwdTile(128), BwdTile(64, start_at_lse=True, bulk_dq=True)
_BWD_D128_WITHOUT_DQ, _BWD_D256 = BwdTile(64), BwdTile(64, apart=True)
_DQ_D64, _DQ_D128, _DQ_D256 = DqTile(128, 2, 2), DqTile(64, 3, 2), DqTile(64, 2, 1, own_staging=False)
SHORT, SHORT_MASKED = 512, 2048  # keys that a row sees


def forward_tile(problem: AttentionProblem) -> FwdTile:
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    if dim > 64:
        return _D128 if dim <= 128 else _D256
    keys, left, right = problem.seqlen_k, problem.window_left, problem.window_right
    if left is None and right is None:
        return _D64_SHORT if keys <= SHORT else _D64
    if left is not None and right is not None:
        keys = min(keys, left + right + 1)
    return _D64_SHORT if keys <= SHORT_MASKED else _D64


def backward_tile(problem: AttentionProblem, dq_apart: bool) -> BwdTile:
    """dq_apart: dQ is made by a kernel of its own, and not added up in memory by that of dK and dV."""
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    if dim > 64:
        return _BWD_D256 if dim > 128 else _BWD_D128_WITHOUT_DQ if dq_apart else _BWD_D128
    return _BWD_D64


def dq_tile(problem: AttentionProblem) -> DqTile:
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    return _DQ_D64 if dim <= 64 else _DQ_D128 if dim <= 128 else _DQ_D256
