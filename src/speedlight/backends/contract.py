"""What every backend module offers, and what passes between the passes.

    supports(problem, target) -> None | reason
    forward(problem, inputs) -> (out, lse)
    backward(problem, inputs, out, lse, dout, dlse, needs) -> Grads

``out`` and ``lse``, both contiguous, are all that a backward gets from a forward, so any backend's backward accepts
any backend's forward. ``lse`` covers the sink and comes before dropout. Rows that see no key have out 0 and lse -inf
(with a sink: out 0, lse = sink) and gradients of exactly 0, as have rows past ``seqused_q`` and rows outside every
sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensors of one call, validated; None where the option is not used.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), or (T, heads, dim) in varlen; last stride 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32, varlen only
    cu_seqlens_k: Tensor | None = None  # (B + 1,) int32, varlen only
    seqused_q: Tensor | None = None  # (B,) int32
    seqused_k: Tensor | None = None  # (B,) int32
    alibi_slopes: Tensor | None = None  # (H,) or (B, H) fp32
    bias: Tensor | None = None  # 4-D, broadcastable to (B, H, Sq, Sk); varlen (B, H, max Sq, max Sk)
    mask: Tensor | None = None  # 4-D bool, True = visible, broadcastable likewise
    sink: Tensor | None = None  # (H,)
    dropout_seed: Tensor | None = None  # one int64
    mask_aux: tuple[Tensor, ...] = ()  # in the order of problem.mask_axes
    bias_aux: tuple[Tensor, ...] = ()  # in the order of problem.bias_axes


class Needs(NamedTuple):
    """Which gradients are asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    alibi_slopes: bool = False
    bias: bool = False
    sink: bool = False


class Grads(NamedTuple):
    """Gradients in the shape and dtype of their inputs; None where not asked for."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
