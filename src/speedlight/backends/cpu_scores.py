"""From q.k to logits, tile by tile, and back: softcap, ALiBi, bias, mask, window and dropout for the cpu backend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dropout import dropout_key, keep_tile
from ..problem import AttentionProblem
from .contract import Inputs
from .cpu_plan import Part, Tile, window_sizes

LOG2E = math.log2(math.e)
WINDOWS_KEPT = 8

# Logits in units of log 2 up to SMALL_LOGIT, with |v| up to SMALL_V: exp2(s) v, summed over 2^30 keys, is below 2^127,
# and the smallest exp2(s) is far from underflow.
SMALL_LOGIT = 64.0
SMALL_V = 2.0**32

Windows = dict[tuple[int, int, int], Tensor]


class Terms(NamedTuple):
    """What a tile adds to its scores and hides of them: (B, H, m, n) or broadcast, None where there is none."""

    distance: Tensor | None = None
    bias: Tensor | None = None
    window: Tensor | None = None  # 0 inside the window, -inf outside; part of hidden where there is one
    hidden: Tensor | None = None
    keep: Tensor | None = None
    # (pairs, rows, 1) rows that see no key of the tile, and (pairs, n, 1) keys that no row of it sees, where a mask or
    # bias decides. They may hold NaN, and 0 * NaN is NaN, so they are zeroed before any product. A window needs no such
    # care: tiles start and end at its edges.
    blind: tuple[Tensor, Tensor] | None = None


NO_TERMS = Terms()


class Scores:
    """The modifiers of one part.

    Logits are in units of log 2, for exp2: torch.exp on a CPU takes up to 200 times as long where its result
    underflows, as for hidden and far keys. With a bias or a sink the unit is natural, because finfo.min * log2(e)
    would be -inf, and because a row without keys has exactly the sink as its lse.
    """

    def __init__(self, problem: AttentionProblem, inputs: Inputs, part: Part, windows: Windows):
        p = self.problem = problem
        self.part = part
        self.windows = windows  # shared by the parts of a call
        has_bias, has_mask = p.bias is not None or p.bias_fn is not None, p.mask is not None or p.mask_fn is not None
        self.unit = 1.0 if has_bias or p.sink else LOG2E
        self.q_unit = 1.0 / p.softcap if p.softcap else self.unit  # the factor of q.k, besides the softmax scale
        self.window_only = not (has_bias or has_mask or p.alibi_batched is not None or p.dropout_threshold)
        self.hides_by_value = has_bias or has_mask

        self.batch = part.batch.stop - part.batch.start
        self.heads = part.heads.stop - part.heads.start
        self.b = torch.arange(part.batch.start, part.batch.stop, device=p.device).view(-1, 1, 1, 1)
        self.h = torch.arange(part.heads.start, part.heads.stop, device=p.device).view(1, -1, 1, 1)
        self.slopes = None
        if inputs.alibi_slopes is not None:
            self.slopes = self.of_part(_slopes_4d(inputs.alibi_slopes)).to(p.lse_dtype)
        self.bias = self._checked("bias", inputs.bias)
        self.mask = self._checked("mask", inputs.mask)
        self.bias_aux = self._aux(p.bias_axes, inputs.bias_aux)
        self.mask_aux = self._aux(p.mask_axes, inputs.mask_aux)
        self.dropout_key = None
        if inputs.dropout_seed is not None:
            self.dropout_key = dropout_key(inputs.dropout_seed.reshape(()), self.b, self.h)

    def of_part(self, t: Tensor) -> Tensor:
        """This part's batch entries and heads of a tensor that broadcasts to (B, H, ., .)."""
        everything = slice(None)
        return t[self.part.batch if t.shape[0] > 1 else everything, self.part.heads if t.shape[1] > 1 else everything]

    def _checked(self, name: str, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        for axis, length in ((2, self.part.seqlen_q), (3, self.part.seqlen_k)):
            if t.shape[axis] != 1 and t.shape[axis] < length:
                raise ValueError(f"{name} must reach the longest sequence: size {t.shape[axis]} for {length} tokens")
        return self.of_part(t)

    def _aux(self, axes: tuple[Any, ...], aux: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        part = self.part
        span = {
            "head": part.heads,
            "q": slice(part.start_q, part.start_q + part.seqlen_q),
            "kv": slice(part.start_k, part.start_k + part.seqlen_k),
        }
        return [(axis, t[span[axis]]) for axis, t in zip(axes, aux, strict=True)]

    def terms(self, tile: Tile) -> Terms:
        """The tile's modifiers, each at its own broadcast shape."""
        p = self.problem
        window = None if tile.full else self._window(tile)
        if self.window_only:
            return NO_TERMS if window is None else Terms(window=window)

        i = torch.arange(tile.m_lo, tile.m_hi, device=p.device).view(1, 1, -1, 1)
        j = torch.arange(tile.n_lo, tile.n_hi, device=p.device).view(1, 1, 1, -1)
        distance = bias = keep = None
        if self.slopes is not None:
            distance = (i + (self.part.seqlen_k - self.part.seqlen_q) - j).abs().to(p.lse_dtype)
        if self.bias is not None:
            bias = of_tile(self.bias, tile)
        elif p.bias_fn is not None:
            bias = self._call(p.bias_fn, self.bias_aux, i, j, tile)
        if self.dropout_key is not None:
            rows, keys = (tile.m_lo, tile.m_hi), (tile.n_lo, tile.n_hi)
            keep = keep_tile(*self.dropout_key, rows, keys, p.dropout_threshold)
        if not self.hides_by_value:
            return Terms(distance, bias, window, None, keep)

        reasons = [] if window is None else [window == -math.inf]
        if bias is not None:
            reasons.append(bias == -math.inf)
        if self.mask is not None:
            reasons.append(~of_tile(self.mask, tile))
        elif p.mask_fn is not None:
            reasons.append(~self._call(p.mask_fn, self.mask_aux, i, j, tile).bool())
        hidden = reasons[0]
        for reason in reasons[1:]:
            hidden = hidden | reason
        return Terms(distance, bias, None, hidden, keep, self._blind(hidden, tile))

    def _shift(self, tile: Tile) -> int:
        """The key, counted from the tile's first, at whose position its first row sits."""
        return tile.m_lo + self.part.seqlen_k - self.part.seqlen_q - tile.n_lo

    def _window(self, tile: Tile) -> Tensor:
        """(m, n) 0 inside the window and -inf outside. Tiles along the diagonal are alike, so a few are kept."""
        key = m, n, shift = tile.m_hi - tile.m_lo, tile.n_hi - tile.n_lo, self._shift(tile)
        if key not in self.windows:
            if len(self.windows) == WINDOWS_KEPT:
                self.windows.clear()
            left, right = window_sizes(self.problem)
            hide = torch.full((m, n), -math.inf, dtype=self.problem.lse_dtype, device=self.problem.device)
            self.windows[key] = hide.triu(shift + right + 1).add_(hide.tril_(shift - left - 1))
        return self.windows[key]

    def _call(self, fn: Any, aux: list[tuple[Any, Tensor]], i: Tensor, j: Tensor, tile: Tile) -> Tensor:
        """What a modifier function returns for a tile, with four dimensions."""
        values = []
        for axis, t in aux:
            if axis == "head":
                values.append(t.view(1, -1, 1, 1))
            elif axis == "q":
                values.append(t[tile.m_lo : tile.m_hi].view(1, 1, -1, 1))
            else:
                values.append(t[tile.n_lo : tile.n_hi].view(1, 1, 1, -1))
        result = fn(self.b, self.h, i, j, self.part.seqlen_q, self.part.seqlen_k, *values)
        result = torch.as_tensor(result, device=i.device)
        return result[(None,) * (4 - result.dim())]

    def _blind(self, hidden: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Rows that see no key of the tile, and keys that no row of it sees, folded as q and k are."""
        part, group = self.part, self.problem.group_size
        m, n = tile.m_hi - tile.m_lo, tile.n_hi - tile.n_lo
        hidden = hidden[(None,) * (4 - hidden.dim())]
        blind = hidden.all(3).expand(self.batch, self.heads, m).reshape(part.pairs, group * m, 1)
        unseen = hidden.all(2).expand(self.batch, self.heads, n).reshape(part.pairs, group, n).all(1)
        return blind, unseen[:, :, None]

    def logits(
        self, q: Tensor, kt: Tensor, tile: Tile, terms: Terms, out: Tensor, cap_slope: Tensor | None = None
    ) -> Tensor:
        """q (pairs, rows, D), which carries softmax_scale * q_unit, times kt (pairs, D, n), modified; hidden ones -inf.

        ``cap_slope`` receives the derivative of the softcap.
        """
        p = self.problem
        s = torch.bmm(q, kt, out=out)
        if p.softcap:
            s.tanh_()
            if cap_slope is not None:
                torch.mul(s, s, out=cap_slope).neg_().add_(1.0)
            s.mul_(p.softcap * self.unit)
        if terms is NO_TERMS:
            return s
        by_head = self.by_head(s)
        if self.slopes is not None and terms.distance is not None:
            by_head.addcmul_(self.slopes, terms.distance, value=-self.unit)
        if terms.bias is not None:
            by_head.add_(terms.bias)
        if terms.window is not None:
            # A hidden score may be NaN, so it is overwritten before -inf is added: a third of masked_fill_'s time.
            if p.window_right is not None:
                by_head.tril_(self._shift(tile) + p.window_right)
            if p.window_left is not None:
                by_head.triu_(self._shift(tile) - p.window_left)
            by_head.add_(terms.window)
        if terms.hidden is not None:
            by_head.masked_fill_(terms.hidden, -math.inf)
        return s

    def by_head(self, tile: Tensor) -> Tensor:
        """(pairs, group * m, n) as (B, H, m, n)."""
        m = tile.shape[0] * tile.shape[1] // (self.batch * self.heads)
        return tile.view(self.batch, self.heads, m, tile.shape[2])

    def are_small(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether no logit of the part can be large, as |q.k| <= |q| |k|: sums of exp(logit) v stay in range.

        False where the answer takes longer than it saves: with few rows or keys, and on a GPU, which would be waited
        for.
        """
        p, part = self.problem, self.part
        short = min(part.seqlen_q * p.group_size, part.seen_hi - part.seen_lo) < 16 * p.head_dim
        if short or p.device.type != "cpu" or self.unit != LOG2E or self.slopes is not None:
            return False
        if not all(abs(x.item()) <= SMALL_V for x in v.aminmax()):  # as NaN is not
            return False
        if p.softcap:
            return p.softcap * self.unit <= SMALL_LOGIT
        q_norm, k_norm = (torch.linalg.vector_norm(t, dim=-1, dtype=p.lse_dtype).amax().item() for t in (q, k))
        return abs(p.softmax_scale) * self.unit * q_norm * k_norm <= SMALL_LOGIT

    def exp_(self, s: Tensor) -> Tensor:
        """exp(s) in place, s in this part's unit."""
        if self.unit != LOG2E:
            s.mul_(LOG2E)
        return s.exp2_()

    def add_grads(self, ds: Tensor, terms: Terms, tile: Tile, d_slopes: Tensor | None, d_bias: Tensor | None) -> None:
        """Add a tile of ds = dL/dlogit to the gradients of slopes and bias, at their own shapes."""
        if d_slopes is not None and terms.distance is not None:
            d_slopes = self.of_part(_slopes_4d(d_slopes))
            d_slopes.sub_((self.by_head(ds) * terms.distance).sum_to_size(d_slopes.shape))
        if d_bias is not None:
            d_bias = of_tile(self.of_part(d_bias), tile)
            d_bias.add_(self.by_head(ds).sum_to_size(d_bias.shape))


def of_tile(t: Tensor, tile: Tile) -> Tensor:
    """The tile of a tensor that broadcasts to (., ., Sq, Sk)."""
    everything = slice(None)
    rows = slice(tile.m_lo, tile.m_hi) if t.shape[2] > 1 else everything
    keys = slice(tile.n_lo, tile.n_hi) if t.shape[3] > 1 else everything
    return t[:, :, rows, keys]


def _slopes_4d(slopes: Tensor) -> Tensor:
    """(H,) or (B, H) as (1 or B, H, 1, 1)."""
    return slopes.view(-1, slopes.shape[-1], 1, 1)
