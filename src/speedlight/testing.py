"""Tools for testing attention: error-ratio comparison, cases with their tensors, and the dropout mask.

An implementation is right when its error against float64 is at most twice that of a plain computation in the same
dtype. That bound needs no tolerance tuned per shape and dtype, and it catches lost precision as well as wrong results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .dropout import keep_mask
from .modifiers import Axis, Bias, Mask

# Part of the largest value that is always allowed. Float32 and shorter by the contract; float64 has no finer yardstick.
_FLOOR = {torch.float64: 1e-12}
_FLOOR_DEFAULT = 1e-5


def assert_close(
    actual: Tensor, expected: Tensor, naive: Tensor | None = None, what: str = "out", slack: float = 0.0
) -> None:
    """Check max|actual - expected| <= 2 max|naive - expected| + 1e-5 max|expected|.

    Args:
        actual: the result under test.
        expected: the float64 result.
        naive: what a plain computation in ``actual``'s dtype gives (:func:`naive_attention`); None allows no error
            beyond the last term.
        what: the name in the message.
        slack: a larger bound, where the plain computation may be exact by luck (:class:`Reference`).

    Raises:
        AssertionError: the bound is broken, shapes differ, or NaN or infinity is not exactly where expected.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    a, e = actual.detach().double(), expected.detach().double()
    special = ~e.isfinite()
    if not torch.equal(a.isnan(), e.isnan()) or not torch.equal(a.isinf(), e.isinf()) or (a != e)[e.isinf()].any():
        wrong = ((a != e) & ~(a.isnan() & e.isnan()) & (special | ~a.isfinite())).nonzero()
        raise AssertionError(
            f"{what}: {len(wrong)} values are NaN or infinite in only one of the two, first at {wrong[0].tolist()}: "
            f"{a[tuple(wrong[0])].item()}, expected {e[tuple(wrong[0])].item()}"
        )
    if special.all():
        return
    error = (a - e).masked_fill(special, 0).abs()
    bound = _FLOOR.get(actual.dtype, _FLOOR_DEFAULT) * e.masked_fill(special, 0).abs().max().item()
    allowed = ""
    if naive is not None:
        naive_error = (naive.detach().double() - e).abs()
        naive_error = naive_error[naive_error.isfinite()]  # a plain computation may overflow where flash must not
        if naive_error.numel():
            bound += 2 * naive_error.max().item()
            allowed = f" (plain {actual.dtype} has {naive_error.max().item():.3g})"
    bound = max(bound, slack)
    if error.max().item() > bound:
        where = tuple((error == error.max()).nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: error {error.max().item():.3g} at {list(where)} exceeds {bound:.3g}{allowed}: "
            f"{a[where].item():.8g}, expected {e[where].item():.8g}"
        )


def assert_lse_close(actual: Tensor, expected: Tensor, seqlen_k: int, what: str = "lse") -> None:
    """Check lse to rtol 1e-5 and atol 2e-6 sqrt(Sk) (float64: both 1e-12), with -inf and NaN exactly where expected."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    a, e = actual.detach().double(), expected.detach().double()
    rtol, atol = 1e-5, 2e-6 * math.sqrt(max(seqlen_k, 1))
    if actual.dtype is torch.float64:
        rtol = atol = 1e-12
    close = torch.isclose(a, e, rtol=rtol, atol=atol, equal_nan=True)  # infinities only equal themselves
    if not close.all():
        where = tuple((~close).nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int((~close).sum())} of {close.numel()} values differ, first at {list(where)}: "
            f"{a[where].item():.8g}, expected {e[where].item():.8g} (rtol {rtol}, atol {atol:.2g})"
        )


def assert_unbiased(actual: Tensor, expected: Tensor, what: str = "out") -> None:
    """Check that the mean signed error lies within 5 standard errors of 0: rounding must not drift one way.

    Raises:
        AssertionError: naming mean and standard error.
    """
    error = (actual.detach().double() - expected.detach().double()).flatten()
    mean, standard_error = error.mean().item(), error.std().item() / math.sqrt(error.numel())
    if not abs(mean) <= 5 * standard_error:
        raise AssertionError(
            f"{what}: the mean signed error {mean:.3g} is {abs(mean) / max(standard_error, 1e-300):.1f} standard "
            f"errors ({standard_error:.3g}) from 0 over {error.numel()} values"
        )


def naive_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Plain attention with every step in q's dtype and the whole score matrix: the yardstick for :func:`assert_close`.

    Arguments and results as :func:`speedlight.reference.attention`, gradients by autograd.
    """
    return reference.attention(q, k, v, dtype=q.dtype, **options)


def naive_attention_varlen(q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: Any, **options: Any) -> Any:
    """:func:`naive_attention` for packed sequences."""
    return reference.attention_varlen(q, k, v, *cu_seqlens, dtype=q.dtype, **options)


def dropout_mask(seed: Tensor, dropout_p: float, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Which attention weights dropout keeps.

    Args:
        seed: the call's ``dropout_seed``, one int64.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k) bool on the seed's device, True = kept. Kept weights are multiplied by
        65536 / (65536 - t), t = min(round(65536 dropout_p), 65535). In varlen b is the sequence, i and j count within.
    """
    sizes = (batch, num_heads, seqlen_q, seqlen_k)
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=seed.device) for n in sizes), indexing="ij")
    return keep_mask(seed, b, h, i, j, min(round(dropout_p * 65536), 65535)).expand(sizes)


@dataclass(frozen=True)
class Case:
    """One attention problem to test, without tensors.

    Dense, or packed when ``lengths_q`` and ``lengths_k`` are given (then ``batch`` and ``seqlen_*`` are not read).

    Bias and mask shapes are strings over (batch, head, query, key): a small letter is the full size, ``1`` size one,
    a capital the full size with stride 0, and leading axes may be missing: "b1qk", "hqk", "bHqk", "k".
    """

    name: str
    batch: int = 2
    seqlen_q: int = 40
    seqlen_k: int = 40
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    tail: int = 0  # tokens after the last sequence, in q, k and v
    int_max_seqlen: bool = True  # pass max_seqlen_* (varlen)
    num_heads: int = 2
    num_heads_kv: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None  # None: head_dim
    dtype: torch.dtype = torch.float32
    std: float = 1.0  # of q and k
    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi: str = ""  # "h" or "bh"
    bias: str = ""
    bias_dtype: torch.dtype | None = None  # None: the case's dtype
    mask: str = ""
    bias_fn: Callable[..., Any] | None = None
    bias_aux: tuple[tuple[Axis, str], ...] = ()  # (axis, "values" or "segments")
    mask_fn: Callable[..., Any] | None = None
    mask_aux: tuple[tuple[Axis, str], ...] = ()
    sink: bool = False
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    dropout_p: float = 0.0
    lse_grad: bool = False  # the loss uses lse too
    layout: str = "contiguous"  # a key of _LAYOUTS, "packed", or "mixed"

    @property
    def varlen(self) -> bool:
        return self.lengths_q is not None

    @property
    def longest_k(self) -> int:
        return max(self.lengths_k, default=0) if self.lengths_k is not None else self.seqlen_k

    @property
    def features(self) -> frozenset[str]:
        """Names of the options in use, for choosing cases."""
        used = {
            "varlen": self.varlen,
            "causal": self.causal,
            "window": self.window != (None, None),
            "softcap": self.softcap > 0,
            "alibi": bool(self.alibi),
            "bias": bool(self.bias),
            "mask": bool(self.mask),
            "bias_fn": self.bias_fn is not None,
            "mask_fn": self.mask_fn is not None,
            "sink": self.sink,
            "seqused": self.seqused_q is not None or self.seqused_k is not None,
            "dropout": self.dropout_p > 0,
            "lse_grad": self.lse_grad,
            "gqa": self.num_heads != self.num_heads_kv,
            "dv": self.head_dim_v not in (None, self.head_dim),
            "layout": self.layout != "contiguous",
            str(self.dtype).removeprefix("torch."): True,
        }
        return frozenset(name for name, on in used.items() if on)


class CaseInputs(NamedTuple):
    """The tensors of a case. ``options`` are keyword arguments of ``speedlight.attention`` or ``attention_varlen``."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: tuple[Any, ...]  # (), or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: dict[str, Any]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The differentiable tensors by argument name."""
        extra = {n: t for n, t in self.options.items() if isinstance(t, Tensor) and t.dtype.is_floating_point}
        return {"q": self.q, "k": self.k, "v": self.v, **extra}

    def replace(self, leaves: dict[str, Tensor]) -> CaseInputs:
        """The same inputs with other tensors for some of :attr:`leaves`."""
        options = {n: leaves.get(n, t) for n, t in self.options.items()}
        q, k, v = (leaves.get(n, t) for n, t in zip("qkv", (self.q, self.k, self.v), strict=True))
        return CaseInputs(q, k, v, self.cu_seqlens, options)

    def call(self, dense: Callable[..., Any], varlen: Callable[..., Any], **more: Any) -> Any:
        function = varlen if self.cu_seqlens else dense
        return function(self.q, self.k, self.v, *self.cu_seqlens, **self.options, **more)


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> CaseInputs:
    """Random tensors for a case, the same values on every device.

    What nobody may look at holds NaN: rows past seqused, rows after the last sequence, and the memory between the
    values of a strided layout.
    """
    with torch.device("cpu"):  # whatever the default device is
        return _make_inputs(case, device, seed)


def _make_inputs(case: Case, device: torch.device | str, seed: int) -> CaseInputs:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    cu_seqlens: tuple[Any, ...] = ()
    if case.varlen:
        assert case.lengths_q is not None and case.lengths_k is not None
        batch, longest_q, longest_k = len(case.lengths_q), max(case.lengths_q, default=0), case.longest_k
        rows_q, rows_k = [sum(case.lengths_q) + case.tail], [sum(case.lengths_k) + case.tail]
        cu = [torch.tensor([0, *lengths]).cumsum(0).int().to(device) for lengths in (case.lengths_q, case.lengths_k)]
        cu_seqlens = (*cu, *((longest_q, longest_k) if case.int_max_seqlen else (None, None)))
    else:
        batch, longest_q, longest_k = case.batch, case.seqlen_q, case.seqlen_k
        rows_q, rows_k = [batch, longest_q], [batch, longest_k]
    head_dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v

    q = randn(*rows_q, case.num_heads, case.head_dim) * case.std
    k = randn(*rows_k, case.num_heads_kv, case.head_dim) * case.std
    v = randn(*rows_k, case.num_heads_kv, head_dim_v)
    q[_outside(case, "q")] = math.nan
    k[_outside(case, "k")] = v[_outside(case, "k")] = math.nan
    q, k, v = _lay_out(case.layout, q, k, v, case.dtype, device)

    sizes = dict(zip("bhqk", (batch, case.num_heads, longest_q, longest_k), strict=True))

    def modifier_aux(aux: tuple[tuple[Axis, str], ...]) -> list[tuple[Axis, Tensor]]:
        counts = {"head": case.num_heads, "q": rows_q[-1], "kv": rows_k[-1]}
        made = []
        for axis, kind in aux:
            n = counts[axis]
            segments = torch.arange(n) * 3 // max(n, 1)  # three documents of about equal length
            made.append((axis, (segments.int() if kind == "segments" else randn(n)).to(device)))
        return made

    options: dict[str, Any] = {}
    for name in ("softmax_scale", "causal", "window", "softcap", "dropout_p"):
        if getattr(case, name) != Case.__dataclass_fields__[name].default:
            options[name] = getattr(case, name)
    if case.alibi:
        options["alibi_slopes"] = randn(*(sizes[c] for c in case.alibi)).abs().mul(0.3).to(device)
    if case.bias:
        made = _broadcast_tensor(case.bias, sizes, randn)
        options["bias"] = made(case.bias_dtype or case.dtype, device)
    if case.bias_fn is not None:
        options["bias"] = Bias(case.bias_fn, modifier_aux(case.bias_aux))
    if case.mask:
        made = _broadcast_tensor(case.mask, sizes, lambda *shape: _random_mask(torch.rand(shape, generator=g) < 0.7))
        options["mask"] = made(torch.bool, device)
    if case.mask_fn is not None:
        options["mask"] = Mask(case.mask_fn, modifier_aux(case.mask_aux))
    if case.sink:
        options["sink"] = randn(case.num_heads).to(device)
    for name in ("seqused_q", "seqused_k"):
        if getattr(case, name) is not None:
            options[name] = torch.tensor(getattr(case, name), dtype=torch.int32, device=device)
    if case.dropout_p:
        options["dropout_seed"] = torch.randint(-(2**62), 2**62, (1,), generator=g).to(device)
    return CaseInputs(q, k, v, cu_seqlens, options)


def _outside(case: Case, side: str) -> Tensor:
    """Rows of q ("q") or k and v ("k") that belong to no sequence: (B, S) or (T,) bool."""
    used = getattr(case, f"seqused_{side}")
    lengths = getattr(case, f"lengths_{side}")
    if lengths is None:
        length = getattr(case, f"seqlen_{side}")
        used = torch.tensor((length,) * case.batch if used is None else used, dtype=torch.int64)
        return torch.arange(length) >= used[:, None]
    used = lengths if used is None else used
    parts = [torch.arange(n) >= u for n, u in zip(lengths, used, strict=True)]
    return torch.cat([*parts, torch.ones(case.tail, dtype=torch.bool)])


def _random_mask(visible: Tensor) -> Tensor:
    """One row that sees nothing and one key that nobody sees, where the axes exist."""
    if visible.shape[-1] > 2:
        visible[..., 2] = False
    if visible.dim() > 1 and visible.shape[-2] > 1:
        visible[..., 1, :] = False
    return visible


def _broadcast_tensor(spec: str, sizes: dict[str, int], make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    shape = [1 if c == "1" or c.isupper() else sizes[c] for c in spec]
    full = [1 if c == "1" else sizes[c.lower()] for c in spec]
    values = make(*shape)
    return lambda dtype, device: values.to(device, dtype).expand(full)


def _strided(t: Tensor, shape: tuple[int, ...], index: tuple[Any, ...]) -> Tensor:
    """t's values inside a larger tensor of NaN."""
    view = t.new_full(shape, math.nan)[index]
    view.copy_(t)
    return view


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "heads_first": lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2),
    "wide": lambda t: _strided(t, (*t.shape[:-1], t.shape[-1] + 5), (..., slice(3, 3 + t.shape[-1]))),
    "every_second_row": lambda t: _strided(
        t, (*t.shape[:-3], 2 * t.shape[-3], *t.shape[-2:]), (..., slice(1, None, 2), slice(None), slice(None))
    ),
    "stepped": lambda t: _strided(t, (*t.shape[:-1], 2 * t.shape[-1]), (..., slice(None, None, 2))),
    "dim_outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "one_head": lambda t: t[..., :1, :].contiguous().expand(t.shape),
}


def _lay_out(
    layout: str, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.to(device, dtype) for t in (q, k, v))
    if layout == "packed":  # slices of one tensor (..., S, H + 2 Hk, D), as a fused projection leaves them
        return torch.cat([q, k, v], -2).split([q.shape[-2], k.shape[-2], v.shape[-2]], -2)
    layouts = ("wide", "heads_first", "every_second_row") if layout == "mixed" else (layout,) * 3
    laid_out = tuple(_LAYOUTS[name](t) for name, t in zip(layouts, (q, k, v), strict=True))
    return laid_out[0], laid_out[1], laid_out[2]


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


class Reference(NamedTuple):
    """What a result is compared with.

    ``slack`` are bounds for the gradients' errors where ``naive`` is better than any backend can be, or by luck:

    - Softmax gradients are differences p (dp - delta). Where they cancel, as over a single key or in the sum over a
      bias of one value, rounding is a part of the terms, not of the result.
    - The backward pass takes delta from ``out``, which was rounded to its dtype when it was saved.
    - The largest of few rounding errors, or a sum of many, may be small by luck.
    """

    expected: Result
    naive: Result
    slack: dict[str, float]


def run(
    dense: Callable[..., Any],
    varlen: Callable[..., Any],
    inputs: CaseInputs,
    dout: Tensor,
    dlse: Tensor | None = None,
    **more: Any,
) -> Result:
    """One forward and backward. ``dense`` and ``varlen`` are called with the case's options and ``return_lse=True``.

    Args:
        dout, dlse: the loss is sum(dout * out) (+ sum(dlse * lse)), without computing it, so values may be NaN.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.leaves.items()}
    out, lse = inputs.replace(leaves).call(dense, varlen, return_lse=True, **more)
    ends = [(out, dout.to(out.dtype))] + ([] if dlse is None else [(lse, dlse.to(lse.dtype))])
    ends = [(end, grad) for end, grad in ends if end.requires_grad]  # an empty problem may depend on nothing
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if ends:
        grads = torch.autograd.grad(
            [end for end, _ in ends], list(leaves.values()), [grad for _, grad in ends], allow_unused=True
        )
    named = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}
    return Result(out.detach(), lse.detach(), named)


_FEW = 1 << 16  # values; the largest error of more is no matter of luck
_DRAWS = 8


def run_reference(inputs: CaseInputs, dout: Tensor, dlse: Tensor | None = None) -> Reference:
    """The float64 result, and what a plain computation in the inputs' dtype makes of it."""
    exact = inputs.replace({name: t.detach().double() for name, t in inputs.leaves.items()})

    def run_exact(dout: Tensor, dlse: Tensor | None) -> Result:
        return run(reference.attention, reference.attention_varlen, exact, dout, dlse)

    def draw(dout: Tensor, dlse: Tensor | None) -> tuple[Result, Result, dict[str, float]]:
        expected = run_exact(dout, dlse)
        naive = run(naive_attention, naive_attention_varlen, inputs, dout, dlse)
        rounding = expected.out - expected.out.to(inputs.q.dtype)
        from_rounded_out = run_exact(dout, _dot_rows(rounding, dout) + (0 if dlse is None else dlse))
        errors = {}
        for name, grad in expected.grads.items():
            both = torch.stack([naive.grads[name].double(), from_rounded_out.grads[name]])
            error = (both - grad).abs()
            errors[name] = error[error.isfinite()].max().item() if error.isfinite().any() else 0.0
        return expected, naive, errors

    expected, naive, errors = draw(dout, dlse)
    slack = {name: 2 * error for name, error in errors.items()}
    few = [name for name, t in inputs.leaves.items() if t.numel() <= _FEW] if inputs.q.dtype.itemsize == 2 else []
    g = torch.Generator("cpu").manual_seed(0)
    for _ in range(_DRAWS if few else 0):
        # Rows times +-0.8 to 1.25: terms of the same size, rounded differently and in other sums.
        factors = torch.rand(dout.shape[:-1], generator=g, device="cpu") * 0.9 - 0.45
        factors = (factors + factors.sign() * 0.8).to(dout.device)
        other = (dout * factors[..., None]).to(dout.dtype), None if dlse is None else dlse * factors.transpose(-1, -2)
        *_, errors = draw(*other)
        for name in few:
            slack[name] = max(slack[name], 2 * errors[name])

    # With delta as lse's gradient the difference p (dp - delta + dlse) is p dp, the term alone.
    terms = run_exact(dout, _dot_rows(expected.out, dout)).grads
    floor = _FLOOR.get(inputs.q.dtype, _FLOOR_DEFAULT)
    for name, t in terms.items():
        slack[name] = max(slack[name], floor * t.abs().max().item() if t.numel() else 0.0)
    return Reference(expected, naive, slack)


def _dot_rows(out: Tensor, dout: Tensor) -> Tensor:
    """sum(out * dout) of each row, shaped like lse."""
    return (out * dout.double()).sum(-1).transpose(-1, -2)


def make_grads(case: Case, inputs: CaseInputs, seed: int = 1) -> tuple[Tensor, Tensor | None]:
    """Random (dout, dlse), NaN in rows outside every sequence; dlse is None unless the case's loss uses lse."""
    g = torch.Generator("cpu").manual_seed(seed)
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    dout = torch.randn(shape, generator=g, device="cpu")
    dlse = torch.randn(shape[:-1], generator=g, device="cpu")
    with torch.device("cpu"):
        outside = _outside(case, "q")
    dout[outside] = math.nan
    dlse[outside] = math.nan
    dlse = dlse.transpose(-1, -2).contiguous()
    return dout.to(inputs.q), dlse.to(inputs.q.device) if case.lse_grad else None


def compare(result: Result, reference: Reference, what: str, seqlen_k: int) -> None:
    """Compare a result with :func:`run_reference`'s: out and every gradient by the ratio rule, lse by its tolerance.

    Raises:
        AssertionError: naming ``what`` and the tensor.
    """
    expected, naive, slack = reference
    lse_dtype = torch.float64 if naive.out.dtype is torch.float64 else torch.float32
    for name, t, dtype in (
        ("out", result.out, naive.out.dtype),
        ("lse", result.lse, lse_dtype),
        *((f"d{name}", grad, naive.grads[name].dtype) for name, grad in result.grads.items()),
    ):
        if t.dtype is not dtype:
            raise AssertionError(f"{what}: {name} is {t.dtype}, expected {dtype}")
    assert_close(result.out, expected.out, naive.out, f"{what}: out")
    assert_lse_close(result.lse, expected.lse, seqlen_k, f"{what}: lse")
    for name, grad in result.grads.items():
        assert_close(grad, expected.grads[name], naive.grads[name], f"{what}: d{name}", slack[name])


def check_result(case: Case, inputs: CaseInputs, result: Result, dout: Tensor, dlse: Tensor | None) -> None:
    """:func:`compare` a result with the reference, and demand exact zeros for rows that see no key and keys that
    nobody sees.

    Raises:
        AssertionError: naming the case and the tensor.
    """
    compare(result, run_reference(inputs, dout, dlse), case.name, case.longest_k)
    blind_rows, unseen_keys = _unused(inputs)
    for name, values in (
        ("out", result.out[blind_rows]),
        ("dq", result.grads["q"][blind_rows]),
        ("dk", result.grads["k"][unseen_keys]),
        ("dv", result.grads["v"][unseen_keys]),
    ):
        if (values != 0).any():
            kind = "rows that see no key" if name in ("out", "dq") else "keys that no row sees"
            raise AssertionError(f"{case.name}: {name} must be exactly 0 for {kind}, got {values.abs().max().item()}")


def check(
    backend_or_fn: str | Callable[..., Any] | None, case: Case, device: torch.device | str = "cpu", seed: int = 0
) -> None:
    """Run a case forward and backward and compare everything with the float64 reference.

    Args:
        backend_or_fn: a backend's name for ``speedlight.attention``, None for its own choice, or a function with the
            signature of ``speedlight.attention`` (for a packed case, of ``attention_varlen``).

    Raises:
        AssertionError: naming the case and the tensor that is wrong.
        UnsupportedError: the backend refuses the case.
    """
    inputs = make_inputs(case, device, seed)
    dout, dlse = make_grads(case, inputs, seed + 1)
    if callable(backend_or_fn):
        result = run(backend_or_fn, backend_or_fn, inputs, dout, dlse)
    else:
        from . import api  # here, so that the comparison tools can be used without a backend

        result = run(api.attention, api.attention_varlen, inputs, dout, dlse, backend=backend_or_fn)
    check_result(case, inputs, result, dout, dlse)


def _unused(inputs: CaseInputs) -> tuple[Tensor, Tensor]:
    """Which (row, head) of q sees no key, and which (key, head) of k is seen by none.

    Read off a reference call with equal scores: lse tells rows that see a key, the gradient of v keys that are seen.
    """
    visibility = ("causal", "window", "bias", "mask", "seqused_q", "seqused_k")
    options = {n: t for n, t in inputs.options.items() if n in visibility}
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    v = torch.zeros_like(inputs.v, dtype=torch.float64).requires_grad_()
    flat = CaseInputs(q, k, v, inputs.cu_seqlens, options)
    out, lse = flat.call(reference.attention, reference.attention_varlen, return_lse=True)
    seen = torch.zeros_like(v, requires_grad=False)
    if out.requires_grad:
        (seen,) = torch.autograd.grad(out.sum(), v)
    return lse.transpose(-1, -2) == -math.inf, (seen == 0).all(-1)
