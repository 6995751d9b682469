"""FlashAttention-2 in plain torch operations: the executable description of the algorithm, on any torch device.

Forward (Dao 2023, Algorithm 1), for each block of rows, over the tiles of keys it sees:
    s = logits(q k^T)                    scaled, capped, biased, hidden ones -inf
    m' = max(m, rowmax s);  p = exp(s - m');  a = exp(m - m')
    l  = a l + rowsum p;    acc = a acc + drop(p) v
and at the end  out = acc / l,  lse = m + log l. A sink is one more logit: m starts as the sink and l as 1.
Where no logit can be large (Cauchy-Schwarz), m stays 0: exp(s) is in range, and two of four passes over s fall away.

Backward (Algorithm 2), from lse alone, with delta = rowsum(out * dout) - dlse:
    p  = exp(s - lse);      dv += drop(p)^T dout
    ds = p * (drop(dout v^T) - delta)
    dq += ds k;  dk += ds^T q;  dbias += ds;  dslope -= ds * distance;  dsink = -sum exp(sink - lse) * delta
The paper has keys outside and rows inside, for parallelism; here tiles follow each other, and both passes share a loop.

Shapes in a part (cpu_plan.py): pairs = batch entries * K/V heads, rows = group * m, where a K/V head's ``group`` query
heads lie one below the other, so K and V are never repeated:
    q, dq (pairs, rows, D)   dout, acc (pairs, rows, Dv)   k, dk (pairs, Sk, D)   v, dv (pairs, Sk, Dv)
    s, p, dp, ds (pairs, rows, n)   m, l, lse, delta (pairs, rows, 1)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..problem import AttentionProblem
from .contract import Grads, Inputs, Needs
from .cpu_plan import BLOCK_N, BLOCK_ROWS, Part, parts, row_blocks
from .cpu_scores import Scores, Windows


def supports(problem: AttentionProblem, target: Any) -> None:
    """None: every valid problem is served."""


def describe_tile(problem: AttentionProblem, target: Any) -> str:
    return f"tiles of up to {BLOCK_ROWS} rows by {BLOCK_N} keys, several heads at once while they fit the cache"


@torch.no_grad()
def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (as q, with v's head dimension) and lse (B, H, Sq), varlen (H, T)."""
    q = inputs.q
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    lse = torch.full(problem.lse_shape, -math.inf, dtype=problem.lse_dtype, device=q.device)
    windows: Windows = {}
    for part in parts(problem, inputs, buffers=1):
        _forward_part(problem, inputs, Scores(problem, inputs, part, windows), out, lse)
    return out, lse


def _forward_part(problem: AttentionProblem, inputs: Inputs, scores: Scores, out: Tensor, lse: Tensor) -> None:
    part, dtype = scores.part, problem.lse_dtype
    q, out = _queries(inputs.q, problem, part), _queries(out, problem, part)
    kt = _fold(_keys(inputs.k, problem, part), dtype).mT
    v = _fold(_keys(inputs.v, problem, part), dtype)
    online = not scores.are_small(q, kt.mT, v)
    lse = _rows(lse, problem, part)
    sink = None
    if inputs.sink is not None:
        sink = inputs.sink[part.heads].to(dtype).view(1, *lse.shape[1:3], 1)
        lse.copy_(sink)  # rows that see a key are overwritten below
    lowest = torch.finfo(dtype).min  # finite: a row without keys must not become exp(-inf + inf)
    tiny = torch.finfo(dtype).tiny
    buffer = _Buffer(kt, part.score_count)

    for m_lo, m_hi, tiles in row_blocks(problem, part):
        q_block = _fold(q[:, :, :, m_lo:m_hi], dtype).mul_(problem.softmax_scale * scores.q_unit)
        m_i = q_block.new_full((*q_block.shape[:2], 1), lowest if online else 0.0)
        l_i = torch.zeros_like(m_i)
        if sink is not None:
            by_row = _fold(sink.expand(*lse.shape[:3], m_hi - m_lo)[..., None], dtype)
            torch.maximum(m_i, by_row, out=m_i)
            l_i.copy_(by_row != -math.inf)
        m_new = torch.empty_like(m_i)
        acc = q_block.new_zeros((*q_block.shape[:2], problem.head_dim_v))

        for tile in tiles:
            terms = scores.terms(tile)
            n_lo, n = tile.n_lo - part.seen_lo, tile.n_hi - tile.n_lo
            kt_tile, v_tile = kt.narrow(2, n_lo, n), v.narrow(1, n_lo, n)
            if terms.blind is not None:
                _, unseen_keys = terms.blind
                kt_tile, v_tile = kt_tile.masked_fill(unseen_keys.mT, 0), v_tile.masked_fill(unseen_keys, 0)
            s = scores.logits(q_block, kt_tile, tile, terms, buffer.tile(*q_block.shape[:2], n))
            if online:
                torch.maximum(m_i, s.amax(-1, keepdim=True), out=m_new)
                rescale = scores.exp_(m_i.sub_(m_new))
                l_i.mul_(rescale)
                acc.mul_(rescale)
                s.sub_(m_new)
                m_i, m_new = m_new, m_i
            p = scores.exp_(s)
            l_i.add_(p.sum(-1, keepdim=True))
            if terms.keep is not None:
                scores.by_head(p).mul_(terms.keep)
            torch.baddbmm(acc, p, v_tile, out=acc)

        _unfold(m_i.div_(scores.unit).add_(l_i.log()), lse[..., m_lo:m_hi, None])
        # l is 0 in a row without keys, where acc is 0 too.
        _unfold(acc.div_(l_i.clamp_(min=tiny).div_(problem.keep_scale)), out[:, :, :, m_lo:m_hi])


@torch.no_grad()
def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs: Needs,
) -> Grads:
    """The gradients asked for, from those of out and lse; None stands for zeros."""
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    wide = problem.lse_dtype
    # A bias without a broadcast axis gets each element once, and needs no wider sum.
    d_bias_dtype = None if inputs.bias is None or 1 not in inputs.bias.shape else wide
    grads = Grads(
        _zeros(inputs.q, needs.q),
        _zeros(inputs.k, needs.k),
        _zeros(inputs.v, needs.v),
        _zeros(inputs.alibi_slopes, needs.alibi_slopes, wide),
        _zeros(inputs.bias, needs.bias, d_bias_dtype),
        _zeros(inputs.sink, needs.sink, wide),
    )
    windows: Windows = {}
    for part in parts(problem, inputs, buffers=2):
        _backward_part(problem, inputs, Scores(problem, inputs, part, windows), out, lse, dout, dlse, grads)
    sources = inputs.q, inputs.k, inputs.v, inputs.alibi_slopes, inputs.bias, inputs.sink
    return Grads(*(t if t is None or x is None else t.to(x.dtype) for t, x in zip(grads, sources, strict=True)))


def _zeros(like: Tensor | None, needed: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    if like is None or not needed:
        return None
    return torch.zeros(like.shape, dtype=dtype or like.dtype, device=like.device)


def _backward_part(
    problem: AttentionProblem,
    inputs: Inputs,
    scores: Scores,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Grads,
) -> None:
    """Write the part's own rows of dq, dk and dv, and add to the other gradients."""
    part, dtype = scores.part, problem.lse_dtype
    q, out, dout = (_queries(t, problem, part) for t in (inputs.q, out, dout))
    k, v = (_fold(_keys(t, problem, part), dtype) for t in (inputs.k, inputs.v))
    kt, vt = k.mT, v.mT
    lse = _rows(lse, problem, part)
    products = out.to(dtype) * dout.to(dtype)
    if scores.hides_by_value or problem.sink:
        # Rows that see no key take part, and their dout may be NaN. Their out is 0; elsewhere a 0 adds nothing anyway.
        products.masked_fill_(out == 0, 0)
    delta = products.sum(-1)
    if dlse is not None:
        delta.sub_(_rows(dlse, problem, part))
    if grads.sink is not None and inputs.sink is not None:
        sink = inputs.sink[part.heads].to(dtype).view(1, *lse.shape[1:3], 1)
        weight = (sink - lse.masked_fill(lse == -math.inf, math.inf)).exp()
        grads.sink[part.heads].sub_((weight * delta).masked_fill_(weight == 0, 0).sum((0, 3)).view(-1))

    needs_ds = any(t is not None for t in (grads.q, grads.k, grads.alibi_slopes, grads.bias))
    if not needs_ds and grads.v is None:
        return
    dk, dv = (None if t is None else torch.zeros_like(like) for t, like in ((grads.k, k), (grads.v, v)))
    s_buffer, dp_buffer = _Buffer(k, part.score_count), _Buffer(k, part.score_count)
    cap_buffer = _Buffer(k, part.score_count) if problem.softcap else None
    lowest = torch.finfo(dtype).min  # finite: the p of a hidden key in a row without keys must not be exp(-inf + inf)
    scratch = _Buffer(k, part.pairs * part.block_n * max(problem.head_dim, problem.head_dim_v))

    for m_lo, m_hi, tiles in row_blocks(problem, part):
        q_block = _fold(q[:, :, :, m_lo:m_hi], dtype).mul_(problem.softmax_scale * scores.q_unit)
        do_block = _fold(dout[:, :, :, m_lo:m_hi], dtype).mul_(problem.keep_scale)
        lse_block, delta_block = (_fold(t[..., m_lo:m_hi, None], dtype) for t in (lse, delta))
        lse_block.mul_(scores.unit).clamp_(min=lowest)
        block = q_block, do_block, delta_block
        dq = torch.zeros_like(q_block)

        for tile in tiles:
            terms = scores.terms(tile)
            n_lo, n = tile.n_lo - part.seen_lo, tile.n_hi - tile.n_lo
            k_tile, kt_tile, vt_tile = k.narrow(1, n_lo, n), kt.narrow(2, n_lo, n), vt.narrow(2, n_lo, n)
            if terms.blind is not None:
                blind_rows, unseen_keys = terms.blind
                q_block, do_block, delta_block = (t.masked_fill(blind_rows, 0) for t in block)
                k_tile, vt_tile = k_tile.masked_fill(unseen_keys, 0), vt_tile.masked_fill(unseen_keys.mT, 0)
                kt_tile = k_tile.mT
            shape = *q_block.shape[:2], n
            cap_slope = None if cap_buffer is None else cap_buffer.tile(*shape)
            s = scores.logits(q_block, kt_tile, tile, terms, s_buffer.tile(*shape), cap_slope)
            p = scores.exp_(s.sub_(lse_block))
            if dv is not None:
                dropped = p if terms.keep is None else (scores.by_head(p) * terms.keep).view(shape)
                _accumulate(dv.narrow(1, n_lo, n), dropped.mT, do_block, scratch)
            if not needs_ds:
                continue
            dp = torch.bmm(do_block, vt_tile, out=dp_buffer.tile(*shape))
            if terms.keep is not None:
                scores.by_head(dp).mul_(terms.keep)
            ds = dp.sub_(delta_block).mul_(p)
            scores.add_grads(ds, terms, tile, grads.alibi_slopes, grads.bias)
            if cap_slope is not None:
                ds.mul_(cap_slope)
            if grads.q is not None:
                torch.baddbmm(dq, ds, k_tile, out=dq)
            if dk is not None:
                _accumulate(dk.narrow(1, n_lo, n), ds.mT, q_block, scratch)

        if grads.q is not None:
            _unfold(dq.mul_(problem.softmax_scale), _queries(grads.q, problem, part)[:, :, :, m_lo:m_hi])
    if grads.k is not None and dk is not None:
        _unfold(dk.div_(scores.q_unit), _keys(grads.k, problem, part))
    if grads.v is not None and dv is not None:
        _unfold(dv, _keys(grads.v, problem, part))


def _accumulate(acc: Tensor, a: Tensor, b: Tensor, scratch: _Buffer) -> None:
    """acc += a @ b, for a slice that baddbmm would treat pair by pair because it has gaps."""
    acc.add_(torch.bmm(a, b, out=scratch.tile(*acc.shape)))


class _Buffer:
    """Memory for a tile of scores, reused by all tiles of a part."""

    def __init__(self, like: Tensor, count: int):
        self.memory = like.new_empty(count)
        self.views: dict[tuple[int, ...], Tensor] = {}

    def tile(self, *shape: int) -> Tensor:
        view = self.views.get(shape)
        if view is None:
            view = self.views[shape] = self.memory[: math.prod(shape)].view(shape)
        return view


def _queries(t: Tensor, problem: AttentionProblem, part: Part) -> Tensor:
    """The part of a tensor like q, as a view (B, Hk, group, Sq, dim)."""
    if problem.varlen:
        t = t[None, part.start_q : part.start_q + part.seqlen_q, part.heads]
    else:
        t = t[part.batch, : part.seqlen_q, part.heads]
    return t.transpose(1, 2).unflatten(1, (-1, problem.group_size))


def _keys(t: Tensor, problem: AttentionProblem, part: Part) -> Tensor:
    """The part of a tensor like k that some row may see, as a view (B, Hk, 1, keys, dim)."""
    keys = slice(part.start_k + part.seen_lo, part.start_k + part.seen_hi)
    t = t[None, keys, part.heads_kv] if problem.varlen else t[part.batch, keys, part.heads_kv]
    return t.transpose(1, 2).unsqueeze(2)


def _rows(t: Tensor, problem: AttentionProblem, part: Part) -> Tensor:
    """The part of a tensor like lse, as a view (B, Hk, group, Sq)."""
    if problem.varlen:
        t = t[None, part.heads, part.start_q : part.start_q + part.seqlen_q]
    else:
        t = t[part.batch, part.heads, : part.seqlen_q]
    return t.unflatten(1, (-1, problem.group_size))


def _fold(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A view (B, Hk, group, m, dim) as a contiguous copy (pairs, group * m, dim)."""
    batch, heads, group, m, dim = t.shape
    return torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t).view(batch * heads, group * m, dim)


def _unfold(t: Tensor, to: Tensor) -> None:
    """Write (pairs, group * m, dim) to a view (B, Hk, group, m, dim)."""
    to.copy_(t.view(to.shape))
