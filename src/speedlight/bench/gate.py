"""No number before the answer is right.

An implementation's out, dq, dk and dv on fresh random inputs are compared with float64. The yardstick is what plain
attention in the same dtype (``Eager``) loses on the same inputs: an exact implementation loses no more than twice that
(relative L2 error), plus 1e-5. The largest single error, a noisier figure, may reach three times. NaN never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .baselines import Eager
from .cases import Case
from .interface import Attention, Implementation
from .record import first_line

NAMES = ("out", "dq", "dk", "dv")
Results = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Verdict:
    """``status``: "passed", "refused" (it said so itself) or "failed". Errors are relative L2, ``ratio`` to plain."""

    status: str
    reason: str = ""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


def small_case(case: Case) -> Case:
    """A problem that is quick in float64 and takes the same path: same head dimension, mask, dtype and GQA group."""
    group = case.num_heads // case.num_heads_kv
    seqlen = 384 if case.window_left is None else max(384, min(2 * (case.window_left + 1), 4096))
    lengths = (384, 129, 7, 120) if case.lengths else ()
    return replace(
        case, name="gate", batch=1 if lengths else 2, seqlen=sum(lengths) or seqlen, num_heads=2 * group,
        num_heads_kv=2, lengths=lengths, mode="timed", optional=False,
    )  # fmt: skip


def random_inputs(case: Case) -> Results:
    """q, k, v and dout from the normal distribution."""
    q_shape, kv_shape = case.shapes()
    q, k, v, dout = (
        torch.randn(shape, device=case.device, dtype=case.dtype) for shape in (q_shape, kv_shape, kv_shape, q_shape)
    )
    return q, k, v, dout


def forward_backward(attn: Attention, inputs: Results) -> Results:
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    out = attn(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])  # type: ignore[return-value]


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, window_left: int | None) -> Results:
    """out, dq, dk, dv in float64, straight from the formulas, (B, S, H, D), a block of query rows at a time.

    P = softmax(scale Q K^T), dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(dO * O)), dQ = scale dS K,
    dK = scale dS^T Q; dK and dV are summed over the query heads of a K/V head.
    """
    batch, seqlen, heads, head_dim = q.shape
    heads_kv, scale = k.shape[2], head_dim**-0.5
    # (B, Hk, G, S, D) and (B, Hk, 1, S, D)
    q64, do64 = (t.double().transpose(1, 2).reshape(batch, heads_kv, -1, seqlen, head_dim) for t in (q, dout))
    k64, v64 = (t.double().transpose(1, 2)[:, :, None] for t in (k, v))
    out, dq, dk, dv = (torch.zeros_like(t) for t in (q64, q64, k64, v64))
    keys = torch.arange(seqlen, device=q.device)
    # Elements of one block of scores: 512 MiB on a GPU, 32 MiB on a CPU.
    rows = max(1, min(seqlen, (1 << (26 if q.is_cuda else 22)) // (batch * heads * seqlen)))
    for start in range(0, seqlen, rows):
        block = slice(start, min(start + rows, seqlen))
        distance = keys[block, None] - keys
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance < 0
        if window_left is not None:
            hidden |= distance > window_left
        qb, dob = q64[..., block, :], do64[..., block, :]
        p = (scale * qb @ k64.transpose(-1, -2)).masked_fill_(hidden, float("-inf")).softmax(-1)
        ob = p @ v64
        ds = (dob @ v64.transpose(-1, -2)).sub_((dob * ob).sum(-1, keepdim=True)).mul_(p)
        out[..., block, :], dq[..., block, :] = ob, scale * ds @ k64
        dk += (scale * ds.transpose(-1, -2) @ qb).sum(2, keepdim=True)
        dv += (p.transpose(-1, -2) @ dob).sum(2, keepdim=True)
    o, a, b, c = (t.flatten(1, 2).transpose(1, 2) for t in (out, dq, dk, dv))
    return o, a, b, c


def reference_for(case: Case, inputs: Results) -> Results:
    """:func:`reference`, sequence by sequence where they are packed."""
    if not case.lengths:
        q, k, v, dout = inputs
        return reference(q, k, v, dout, case.causal, case.window_left)
    pieces = zip(*(t[None].split(list(case.lengths), 1) for t in inputs), strict=True)
    parts = [reference(q, k, v, dout, case.causal, case.window_left) for q, k, v, dout in pieces]
    out, dq, dk, dv = (torch.cat(ts, 1)[0] for ts in zip(*parts, strict=True))
    return out, dq, dk, dv


def relative_error(x: Tensor, ref: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float(torch.linalg.vector_norm(x.double() - ref) / torch.linalg.vector_norm(ref).clamp_min(1e-300))


def largest_error(x: Tensor, ref: Tensor) -> float:
    """Largest difference over the largest reference value."""
    return float((x.double() - ref).abs().max() / ref.abs().max().clamp_min(1e-300))


class Gate:
    """Verdicts by implementation and kind of problem; references and plain errors are computed once per kind."""

    def __init__(self) -> None:
        self._problems: dict[Case, tuple[Results, Results, dict[str, tuple[float, float]]]] = {}
        self._verdicts: dict[tuple[str, Case], Verdict] = {}

    def check(self, implementation: Implementation, case: Case) -> Verdict:
        small = small_case(case)
        key = (implementation.name, small)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(implementation, small)
        return self._verdicts[key]

    def plain_errors(self, case: Case) -> dict[str, tuple[float, float]]:
        """(L2, largest) error of plain attention on the small problem, by output name."""
        return self._problem(small_case(case))[2]

    def _problem(self, small: Case) -> tuple[Results, Results, dict[str, tuple[float, float]]]:
        if small not in self._problems:
            inputs = random_inputs(small)
            wanted = reference_for(small, inputs)
            plain = forward_backward(Eager().make(small), inputs)
            errors = {
                name: (relative_error(x, ref), largest_error(x, ref))
                for name, x, ref in zip(NAMES, plain, wanted, strict=True)
            }
            self._problems[small] = inputs, wanted, errors
        return self._problems[small]

    def _judge(self, implementation: Implementation, small: Case) -> Verdict:
        inputs, wanted, plain = self._problem(small)
        try:
            attn = implementation.make(small)
            implementation.prepare()
            with poisoned(inputs):
                results = forward_backward(attn, inputs)
        except NotImplementedError as error:  # speedlight's UnsupportedError is one
            return Verdict("refused", first_line(error))
        except Exception as error:
            # Peers have no agreed way of refusing; ours must not raise anything else.
            status = "failed" if implementation.ours else "refused"
            return Verdict(status, f"{type(error).__name__}: {first_line(error)}")
        errors, faults = {}, []
        for name, x, ref in zip(NAMES, results, wanted, strict=True):
            if x.shape != ref.shape or x.dtype != small.dtype:
                faults.append(f"{name} is {tuple(x.shape)} {x.dtype}, not {tuple(ref.shape)} {small.dtype}")
                continue
            l2, largest = relative_error(x, ref), largest_error(x, ref)
            plain_l2, plain_largest = plain[name]
            errors[name] = {"l2": l2, "ratio": l2 / max(plain_l2, 1e-300)}
            if not (l2 <= 2 * plain_l2 + 1e-5 and largest <= 3 * plain_largest + 1e-5):
                than = f"plain {plain_l2:.2g} ({plain_largest:.2g})"
                faults.append(f"{name} has error {l2:.2g} (largest {largest:.2g}), {than}")
        return Verdict("failed" if faults else "passed", "; ".join(faults), errors)


def spot(case: Case) -> Callable[[Results], Results]:
    """A cut through tensors of the case's own size that can be checked: one K/V head with its query heads, of the last
    batch entry or of the first packed sequence. Far offsets are where address arithmetic goes wrong."""
    group = case.num_heads // case.num_heads_kv

    def cut(tensors: Results) -> Results:
        pieces = []
        for t in tensors:
            t = t[None, : case.lengths[0]] if case.lengths else t[-1:]
            heads = group if t.shape[2] == case.num_heads else 1
            pieces.append(t[:, :, -heads:])
        a, b, c, d = pieces
        return a, b, c, d

    return cut


def spot_faults(results: Results, wanted: Results, plain: dict[str, tuple[float, float]]) -> str:
    """Empty, or what is wrong at the case's own size. The yardstick is of another length, hence 3 in place of 2."""
    faults = []
    for name, x, ref in zip(NAMES, results, wanted, strict=True):
        l2 = relative_error(x, ref)
        if not l2 <= 3 * plain[name][0] + 1e-5:
            faults.append(f"{name} has error {l2:.2g} at full size, plain {plain[name][0]:.2g} at small size")
    return "; ".join(faults)


@contextmanager
def poisoned(like: tuple[Tensor, ...]) -> Iterator[None]:
    """Make memory that is handed out uninitialised hold NaN, so that an output nobody writes is seen.

    CUDA: freed blocks of the outputs' sizes are left in the caching allocator full of NaN bits (0xFF); the next
    allocations of those sizes get them. CPU: torch.empty and its kin are replaced meanwhile.
    """
    if like[0].is_cuda:
        blocks = [torch.full((t.nbytes,), 255, dtype=torch.uint8, device=t.device) for t in like for _ in range(3)]
        del blocks
        yield
        return

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*args: Any, **kwargs: Any) -> Tensor:
            t = make(*args, **kwargs)
            with torch.no_grad():
                return t.fill_(float("nan")) if t.is_floating_point() else t

        return fill

    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, make in kept:
        setattr(owner, name, filled(make))
    try:
        yield
    finally:
        for owner, name, make in kept:
            setattr(owner, name, make)
