"""What a contender is. Its kinds are in baselines.py (Speedlight, torch, textbook) and peers.py (the rest)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from .cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Implementation:
    """One contender. ``compiles``: its first call compiles, so that warming its disk cache saves time."""

    name: str
    ours = False
    compiles = False

    def importable(self) -> str | None:
        """None, or why this machine does not have it."""
        return None

    def supports(self, case: Case) -> str | None:
        """None, or why it does not serve the case."""
        return None

    def prepare(self) -> None:
        """Untimed, before every timed forward: global switches of the call."""

    def make(self, case: Case) -> Attention:
        """A differentiable ``attn(q, k, v) -> out`` on (B, S, H, D), or (T, H, D) for packed sequences.

        Whatever can be prepared (masks, cu_seqlens, libraries) is prepared here, so that the call is the call.
        """
        raise NotImplementedError


def cu_seqlens(case: Case) -> Tensor:
    """(n + 1,) int32 row offsets of packed sequences."""
    return torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=case.device)
