"""Dense attention in float64: the definition that every backend is tested against.

One sequence at a time, with the whole score matrix, in the order of the contract:

    s = softmax_scale * q.k    softcap    ALiBi    + bias    mask    softmax with the sink as one more logit
    dropout    . v

Every step is an ordinary differentiable torch operation, so autograd differentiates the result as often as needed,
backward or forward. Shares no code with the backends. Slow, and its memory grows with Sq * Sk.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import keep_mask
from .modifiers import Bias, Mask

INF = math.inf


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """:func:`speedlight.attention` by definition.

    Args:
        q, k, v: (B, Sq, H, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv), any dtype, any strides.
        dtype: the precision of every step. Float64 makes the oracle; the inputs' own dtype shows what a plain
            computation loses, the yardstick of the error-ratio rule.
        options: softmax_scale, causal, window, softcap, alibi_slopes, bias, mask, sink, dropout_p, dropout_seed as in
            the public function. ``keep``, a bool tensor broadcastable to (B, H, Sq, Sk), True = kept, takes the place
            of ``dropout_seed``.

    Returns:
        out (B, Sq, H, Dv), and with ``return_lse`` also lse (B, H, Sq), both in ``dtype``.
    """
    batch, seqlen_q, num_heads, _ = q.shape
    outs = [q.new_zeros(0, seqlen_q, num_heads, v.shape[-1], dtype=dtype)]
    lses = [q.new_zeros(0, num_heads, seqlen_q, dtype=dtype)]
    for b in range(batch):
        used_q = seqlen_q if seqused_q is None else int(seqused_q[b])
        used_k = k.shape[1] if seqused_k is None else int(seqused_k[b])
        out, lse = _sequence(b, q[b, :used_q], k[b, :used_k], v[b, :used_k], 0, 0, dtype, **options)
        outs.append(_pad_out(out, seqlen_q)[None])
        lses.append(_pad_lse(lse, seqlen_q)[None])
    out, lse = torch.cat(outs), torch.cat(lses)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    """:func:`speedlight.attention_varlen` by definition. Arguments as :func:`attention`; no result depends on
    ``max_seqlen_*``.

    Returns:
        out (Tq, H, Dv), and with ``return_lse`` also lse (H, Tq).
    """
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        start_q, start_k = starts_q[b], starts_k[b]
        length_q, length_k = starts_q[b + 1] - start_q, starts_k[b + 1] - start_k
        used_q = length_q if seqused_q is None else int(seqused_q[b])
        used_k = length_k if seqused_k is None else int(seqused_k[b])
        keys = slice(start_k, start_k + used_k)
        out, lse = _sequence(
            b, q[start_q : start_q + used_q], k[keys], v[keys], start_q, start_k, dtype, **options
        )  # fmt: skip
        outs.append(_pad_out(out, length_q))
        lses.append(_pad_lse(lse, length_q))
    outside = q.shape[0] - starts_q[-1]
    outs.append(q.new_zeros(outside, q.shape[1], v.shape[-1], dtype=dtype))
    lses.append(q.new_full((q.shape[1], outside), -INF, dtype=dtype))
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return (out, lse) if return_lse else out


def _sequence(
    b: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start_q: int,
    start_k: int,
    dtype: torch.dtype,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | Mask | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sequence number b: q (Sq, H, D), k (Sk, Hk, D), v (Sk, Hk, Dv) -> out (Sq, H, Dv), lse (H, Sq).

    ``start_q`` and ``start_k`` are the sequence's first tokens, from which aux values of Mask and Bias are read.
    """
    (seqlen_q, num_heads, head_dim), (seqlen_k, num_heads_kv, _) = q.shape, k.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    entry = torch.tensor(b, device=q.device)
    h = torch.arange(num_heads, device=q.device)[:, None, None]
    i = torch.arange(seqlen_q, device=q.device)[None, :, None]
    j = torch.arange(seqlen_k, device=q.device)[None, None, :]
    position = i + seqlen_k - seqlen_q  # bottom-right: the last query stands at the last key

    def modifier(m: Mask | Bias) -> Tensor:
        index = {"head": h, "q": i + start_q, "kv": j + start_k}
        aux = [values[index[axis]] for axis, values in m.aux]
        return torch.as_tensor(m.fn(entry, h, i, j, seqlen_q, seqlen_k, *aux))

    def part(t: Tensor) -> Tensor:
        """This sequence's (H or 1, Sq or 1, Sk or 1) of a tensor broadcastable to (B, H, Sq, Sk)."""
        t = t[(None,) * (4 - t.dim())]
        t = t[b if t.shape[0] > 1 else 0]
        t = t[:, :seqlen_q] if t.shape[1] > 1 else t
        return t[..., :seqlen_k] if t.shape[2] > 1 else t

    left, right = window
    right = 0 if causal else right
    visible = torch.ones(num_heads, seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if left is not None:
        visible = visible & (j >= position - left)
    if right is not None:
        visible = visible & (j <= position + right)
    if mask is not None:
        visible = visible & (modifier(mask) if isinstance(mask, Mask) else part(mask))
    if bias is not None:
        bias = (modifier(bias) if isinstance(bias, Bias) else part(bias)).to(dtype)
        visible = visible & (bias != -INF)

    # Keys that nobody sees and rows that see nothing may hold NaN, and 0 * NaN would carry it on.
    group = num_heads // max(num_heads_kv, 1)
    sees, seen = visible.any(2)[..., None], visible.any(1)[..., None]
    q = q.to(dtype).transpose(0, 1).masked_fill(~sees, 0)
    k = k.to(dtype).transpose(0, 1).repeat_interleave(group, 0).masked_fill(~seen, 0)
    v = v.to(dtype).transpose(0, 1).repeat_interleave(group, 0).masked_fill(~seen, 0)

    s = (q @ k.mT) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
        s = s - (slopes.double()[:, None, None] * (position - j).abs()).to(dtype)
    if bias is not None:
        s = s + bias
    s = s.masked_fill(~visible, -INF)

    sink = q.new_full((num_heads,), -INF) if sink is None else sink.to(dtype)
    logits = torch.cat([s, sink[:, None, None].expand(num_heads, seqlen_q, 1)], -1)
    empty = (logits == -INF).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0)  # any finite value: softmax of nothing but -inf is NaN
    p = logits.softmax(-1)[..., :-1].masked_fill(empty, 0)
    lse = logits.logsumexp(-1).masked_fill(empty[..., 0], -INF)

    if dropout_p:
        threshold = min(round(dropout_p * 65536), 65535)
        if keep is None:
            assert dropout_seed is not None, "dropout needs dropout_seed or keep"
            kept = keep_mask(dropout_seed, entry, h, i, j, threshold)
        else:
            kept = part(keep)
        p = p * kept.to(dtype) * (65536 / (65536 - threshold))
    return (p @ v).transpose(0, 1), lse


def _pad_out(out: Tensor, length: int) -> Tensor:
    return F.pad(out, (0, 0, 0, 0, 0, length - out.shape[0]))


def _pad_lse(lse: Tensor, length: int) -> Tensor:
    return F.pad(lse, (0, length - lse.shape[1]), value=-INF)
