"""The public functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import ops
from .modifiers import Bias, Mask
from .problem import Window

AttentionOutput = Tensor | tuple[Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | Mask | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> AttentionOutput:
    """Exact softmax attention, differentiable, without a score matrix in memory.

    ``out = dropout(softmax(score)) v`` with ``score = softmax_scale * q k^T``, then softcap, ALiBi, bias and mask, in
    this order. Query row i stands at position i + Sk - Sq (bottom-right alignment) for ``causal``, ``window`` and
    ALiBi. Rows that see no key give out 0, lse -inf and gradients 0.

    Args:
        q: (B, Sq, H, D), float32, float64, bfloat16 or float16. Any strides; the last should be 1.
        k: (B, Sk, Hk, D), H a multiple of Hk (GQA; Hk = 1 is MQA): query head h reads K/V head h // (H / Hk).
        v: (B, Sk, Hk, Dv).
        softmax_scale: factor on q k^T; default D ** -0.5.
        causal: row i sees keys up to its own position.
        window: (left, right), inclusive: keys from position - left to position + right. None is unlimited.
        softcap: score = softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: (H,) or (B, H) float32; adds -slope * |i + Sk - Sq - j| (Press et al. 2022). Differentiable.
        bias: float tensor broadcastable to (B, H, Sq, Sk), in natural-log units, differentiable; or a
            :class:`~speedlight.Bias` function.
        mask: bool tensor broadcastable to (B, H, Sq, Sk), True = visible; or a :class:`~speedlight.Mask` function.
        sink: (H,), one more logit per row that has no value, neither scaled nor capped. Differentiable.
        seqused_q, seqused_k: (B,) int32; rows and keys from there on are padding, and Sq, Sk mean these lengths.
        dropout_p: probability of dropping an attention weight, in [0, 1), realised in steps of 2^-16.
        dropout_seed: one int64 on q's device that fixes the dropout mask; drawn when missing.
        generator: the source of that draw (eager only).
        deterministic: bitwise equal gradients over repeated runs.
        return_lse: return (out, lse), lse = log(sum exp(score) + exp(sink)), (B, H, Sq), float32 (float64 for float64
            inputs), differentiable.
        backend: None chooses; "cpu", "fa1", "fa2" or "fa3" uses that one or raises.

    Returns:
        out (B, Sq, H, Dv) in q's dtype, contiguous; with ``return_lse`` (out, lse).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        UnsupportedError: no backend, or not the requested one, serves this valid problem.

    Source: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023), section 3; Shah et al.,
    "FlashAttention-3" (2024).
    """
    q, k, v = _autocast(q, k, v)
    if dropout_p and dropout_seed is None:
        dropout_seed = _draw_seed(q, generator)
    out, lse = ops.attention(
        q, k, v, None, None, None, None, backend, softmax_scale, causal, window, softcap,
        alibi_slopes, bias, mask, sink, seqused_q, seqused_k, dropout_p, dropout_seed, deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | Mask | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> AttentionOutput:
    """:func:`attention` over sequences of different lengths, packed one after the other.

    Args:
        q: (Tq, H, D); k: (Tk, Hk, D); v: (Tk, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32; sequence b holds rows cu[b] to cu[b + 1]. Sequences may be empty.
            Rows after the last one get out 0, lse -inf and gradients 0. Values are checked on the CPU; on a GPU that
            would synchronise, and they are clamped to the tensors instead.
        max_seqlen_q, max_seqlen_k: the longest sequence, as a hint: no result depends on it and no value is read
            from a tensor. An int that is too small raises where lengths can be read (on the CPU).
        bias, mask: broadcastable to (B, H, max Sq, max Sk), indexed within each sequence. Aux tensors of functions
            along "q" and "kv" are (Tq,) and (Tk,).
        Others: as :func:`attention`.

    Returns:
        out (Tq, H, Dv); with ``return_lse`` (out, lse), lse (H, Tq).
    """
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens is None:
            raise ValueError(f"{name} is missing: attention_varlen needs cu_seqlens_q and cu_seqlens_k")
    q, k, v = _autocast(q, k, v)
    if dropout_p and dropout_seed is None:
        dropout_seed = _draw_seed(q, generator)
    out, lse = ops.attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend, softmax_scale, causal, window,
        softcap, alibi_slopes, bias, mask, sink, seqused_q, seqused_k, dropout_p, dropout_seed, deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys, as if they had been one. Differentiable.

    Args:
        out_a, out_b: (B, S, H, D) or (T, H, D).
        lse_a, lse_b: (B, H, S) or (H, T). -inf marks an empty part, whose gradients are 0. A sink may be in at most
            one of the parts.

    Returns:
        out in the wider of the outs' dtypes, and lse.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(
            f"both parts must have one shape, got out {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    expected = (*out_a.shape[:-3], out_a.shape[-2], out_a.shape[-3])
    if out_a.dim() not in (3, 4) or tuple(lse_a.shape) != expected:
        raise ValueError(f"lse must have shape {expected} for out {tuple(out_a.shape)}, got {tuple(lse_a.shape)}")
    # Weights by sigmoid of the difference: finite however far the parts are apart. Where a part is empty the
    # difference is +-inf or NaN; those rows take the other part by selection, so no NaN reaches a gradient.
    empty_a, empty_b = lse_a == float("-inf"), lse_b == float("-inf")
    both_full = ~(empty_a | empty_b)
    safe_a, safe_b = torch.where(both_full, lse_a, 0.0), torch.where(both_full, lse_b, 0.0)
    weight_b = torch.sigmoid(safe_b - safe_a)
    lse = safe_a - torch.nn.functional.logsigmoid(safe_a - safe_b)
    lse = torch.where(empty_b, lse_a, torch.where(empty_a, lse_b, lse))

    def rows(t: Tensor) -> Tensor:
        return t.transpose(-1, -2)[..., None]

    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    a, b = out_a.to(lse.dtype), out_b.to(lse.dtype)
    out = a + rows(weight_b) * (b - a)
    out = torch.where(rows(both_full), out, torch.where(rows(empty_b), a, b))
    out = torch.where(rows(empty_a & empty_b), 0.0, out)
    return out.to(dtype), lse


def warmup(problems: Iterable[tuple[tuple[Any, ...], dict[str, Any]]], *, backward: bool = True) -> None:
    """Compile the kernels of the listed problems now, so that later calls find them ready.

    Args:
        problems: (args, kwargs) pairs as for :func:`attention` (three tensors) or :func:`attention_varlen` (five to
            seven). The tensors' values do not matter, their device, shapes, strides and dtypes do. Each problem is run
            once.
        backward: also compile the gradients.
    """
    for args, kwargs in problems:
        args = tuple(t.detach().requires_grad_(backward) if n < 3 else t for n, t in enumerate(args))
        function = attention if len(args) == 3 else attention_varlen
        with torch.set_grad_enabled(backward):
            out = function(*args, **{**kwargs, "return_lse": False})
        assert isinstance(out, Tensor)
        if backward:
            torch.autograd.grad(out, args[:3], torch.zeros_like(out))


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast acts on q, k and v only; slopes, biases and sinks keep their precision."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    device_type = q.device.type
    if device_type == "meta" or q.dtype is torch.float64:
        return q, k, v
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _draw_seed(q: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is not None and torch.compiler.is_compiling():
        raise RuntimeError("generator cannot be used under torch.compile; pass dropout_seed, an int64 tensor, instead")
    device = q.device if generator is None else generator.device
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device, generator=generator).to(q.device)
