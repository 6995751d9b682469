"""The contract of every backend: the whole case list against the float64 reference, and what holds across backends.

`cpu` runs everywhere, the Triton backends on a GPU or, with TRITON_INTERPRET=1, on CPU tensors.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from cases import BY_NAME, CASES, GPU_CASES

import speedlight
from speedlight import UnsupportedError, reference, select
from speedlight.backends.contract import Grads, Needs
from speedlight.problem import describe
from speedlight.target import target_of
from speedlight.testing import (
    Case,
    CaseInputs,
    Result,
    assert_unbiased,
    check,
    check_result,
    make_grads,
    make_inputs,
    run,
)

_TRITON = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKENDS = ("cpu", *(("fa1", "fa2") if _TRITON else ()), *(("fa3",) if _HOPPER else ()))


# What `fa3` leaves to `fa2`.
_NOT_FA3 = {"alibi", "bias", "bias_fn", "mask", "mask_fn", "sink", "dropout", "float32"}
_FA1 = {"causal", "gqa", "dv", "layout", "lse_grad", "bfloat16", "float16"}  # and float32 in the interpreter


def _may_refuse(backend: str, case: Case) -> bool:
    """`cpu` serves everything, `fa2` all but float64 and dimensions above 256, `fa1` plain and causal attention."""
    largest = max(case.head_dim, case.head_dim_v or 0)
    if backend == "fa1":
        return largest > 128 or not case.features <= _FA1
    if backend == "fa3" and case.features & _NOT_FA3:
        return True
    return backend in ("fa2", "fa3") and (largest > 256 or "float64" in case.features)


def _check(backend: str, case: Case, device: torch.device, seed: int = 0) -> None:
    try:
        check(backend, case, device, seed)
    except UnsupportedError as refusal:
        if not _may_refuse(backend, case):
            raise
        pytest.skip(str(refusal))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_case(backend, case, device):
    _check(backend, case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["fa1", "fa2"])
def test_large_case(backend, case):
    _check(backend, case, torch.device("cuda"))


# Passes called directly, as `ops` calls them.


def _describe(inputs: CaseInputs):
    cu = inputs.cu_seqlens
    return describe(inputs.q, inputs.k, inputs.v, *cu, **inputs.options)


def _module(name: str, problem, device: torch.device):
    module, reason = select.load(name, target_of(device))
    reason = reason or module.supports(problem, target_of(device))
    if reason is not None:
        assert name != "cpu", f"{name} refuses: {reason}"
        pytest.skip(f"{name}: {reason}")
    return module


def _forward(name: str, inputs: CaseInputs, device: torch.device):
    problem, tensors = _describe(inputs)
    if name != "reference":
        return _module(name, problem, device).forward(problem, tensors)
    out, lse = inputs.call(reference.attention, reference.attention_varlen, return_lse=True)
    return out.to(problem.dtype), lse.to(problem.lse_dtype)


def _backward(name: str, inputs: CaseInputs, device: torch.device, out, lse, dout, dlse, needs: Needs) -> Grads:
    problem, tensors = _describe(inputs)
    return _module(name, problem, device).backward(problem, tensors, out, lse, dout, dlse, needs)


def _needs(inputs: CaseInputs) -> Needs:
    return Needs(**{name: name in inputs.leaves for name in Needs._fields})


def _named(grads: Grads, inputs: CaseInputs) -> dict[str, torch.Tensor]:
    return {n: getattr(grads, n).reshape(t.shape) for n, t in inputs.leaves.items()}


_PAIRED = (
    "plain", "long", "causal_blind_rows", "window_both", "softcap_causal", "alibi_lse_grad", "bias__hqk", "mask_bhqk",
    "mask_fn_segments", "sink_blind_rows", "dropout_gqa_causal", "seqused_none", "varlen_zero_lengths_causal",
    "varlen_tail", "combined", "combined_functions", "combined_varlen", "combined_varlen_functions", "plain_bf16",
    "combined_bf16", "combined_varlen_f16",
)  # fmt: skip


# A backend's own forward with its own backward is test_case.
_PAIRS = [(f, b) for f in ("reference", *BACKENDS) for b in BACKENDS if f != b]


@pytest.mark.parametrize("name", _PAIRED)
@pytest.mark.parametrize(("forward", "backward"), _PAIRS, ids=lambda name: name)
def test_any_backward_takes_any_forward(forward, backward, name, device):
    case = BY_NAME[name]
    inputs = make_inputs(case, device)
    dout, dlse = make_grads(case, inputs)
    out, lse = _forward(forward, inputs, device)
    grads = _backward(backward, inputs, device, out, lse, dout, dlse, _needs(inputs))
    check_result(case, inputs, Result(out, lse, _named(grads, inputs)), dout, dlse)


@pytest.mark.parametrize("name", ["causal_blind_rows", "varlen_tail", "combined", "combined_varlen"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_gradients_asked_for_are_computed(backend, name, device):
    inputs = make_inputs(BY_NAME[name], device)
    dout, dlse = make_grads(BY_NAME[name], inputs)
    out, lse = _forward(backend, inputs, device)
    everything = _backward(backend, inputs, device, out, lse, dout, dlse, _needs(inputs))
    none = Needs(*[False] * len(Needs._fields))
    for wanted in [{n} for n in Needs._fields] + [{"q", "v"}, {"k", "bias"}, {"k", "v"}, {"q", "sink"}]:
        if not wanted <= set(inputs.leaves):
            continue
        needs = none._replace(**dict.fromkeys(wanted, True))
        grads = _backward(backend, inputs, device, out, lse, dout, dlse, needs)
        for n, grad in grads._asdict().items():
            if n in wanted:
                torch.testing.assert_close(grad, getattr(everything, n), rtol=1e-4, atol=1e-5)
            else:
                assert grad is None, f"{n} was computed though only {wanted} were asked for"


@pytest.mark.parametrize("name", ["plain", "causal_blind_rows", "sink_blind_rows", "varlen_tail", "combined"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("used", ["out", "lse"])
def test_a_loss_of_only_out_or_only_lse(used, backend, name, device):
    """The other gradient arrives as None, and means zeros."""
    inputs = make_inputs(BY_NAME[name], device)
    dout, dlse = make_grads(BY_NAME[name], inputs)
    dlse = torch.randn(dlse.shape if dlse is not None else _forward(backend, inputs, device)[1].shape, device=device)
    out, lse = _forward(backend, inputs, device)
    given, zeros = ((dout, None), (dout, torch.zeros_like(dlse)))
    if used == "lse":
        given, zeros = ((None, dlse), (torch.zeros_like(dout), dlse))
    grads = _backward(backend, inputs, device, out, lse, *given, _needs(inputs))
    same = _backward(backend, inputs, device, out, lse, *zeros, _needs(inputs))
    for n, grad in _named(grads, inputs).items():
        torch.testing.assert_close(grad, _named(same, inputs)[n], rtol=1e-4, atol=1e-5)
        assert used == "lse" or (grad != 0).any()
    if used == "lse":
        assert (grads.v == 0).all()
        assert (grads.q != 0).any()


def _bytes(inputs: CaseInputs, *more: torch.Tensor | None) -> list[torch.Tensor]:
    tensors = [*inputs[:3], *inputs.cu_seqlens, *inputs.options.values(), *more]
    for modifier in inputs.options.values():
        tensors += [t for _, t in getattr(modifier, "aux", ())]
    return [t.contiguous().view(torch.uint8).clone() for t in tensors if isinstance(t, torch.Tensor) and t.numel()]


@pytest.mark.parametrize(
    "name",
    ["plain", "bias_stride_0_heads", "layout_packed", "layout_stepped", "seqused_causal", "varlen_tail", "combined",
     "combined_functions", "combined_varlen", "combined_varlen_functions", "combined_bf16"],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_that_is_passed_in_is_modified(backend, name, device):
    inputs = make_inputs(BY_NAME[name], device)
    dout, dlse = make_grads(BY_NAME[name], inputs)
    before = _bytes(inputs)
    out, lse = _forward(backend, inputs, device)
    assert all(map(torch.equal, _bytes(inputs), before))
    before = _bytes(inputs, out, lse, dout, dlse)
    _backward(backend, inputs, device, out, lse, dout, dlse, _needs(inputs))
    assert all(map(torch.equal, _bytes(inputs, out, lse, dout, dlse), before))


# NaN stays where it is.


def _run(backend: str, inputs: CaseInputs, dout, dlse=None, **more) -> Result:
    try:
        return run(speedlight.attention, speedlight.attention_varlen, inputs, dout, dlse, backend=backend, **more)
    except UnsupportedError as refusal:
        if backend == "cpu":
            raise
        pytest.skip(str(refusal))


_ISOLATED = Case("isolated", batch=2, seqlen_q=37, seqlen_k=45, num_heads=4, num_heads_kv=2, causal=True, lse_grad=True)
# Query row i of this case sees keys up to i + 8.


def _with_and_without(backend, device, place, value):
    """The case's result, and the result with ``value`` put at ``place`` = (tensor, batch, row, head)."""
    inputs = make_inputs(_ISOLATED, device)
    dout, dlse = make_grads(_ISOLATED, inputs)
    name, b, row, head = place
    spoilt = inputs.leaves[name].clone()
    spoilt[b, row, head, 3] = value
    return _run(backend, inputs, dout, dlse), _run(backend, inputs.replace({name: spoilt}), dout, dlse)


def _other_heads(t: torch.Tensor, b: int, heads: slice) -> torch.Tensor:
    """t (B, S, H, D) without the given heads of batch entry b."""
    keep = torch.ones(t.shape[0], t.shape[2], dtype=torch.bool, device=t.device)
    keep[b, heads] = False
    return t.transpose(1, 2)[keep]


def _gradients_of_others_equal(clean: Result, spoilt: Result, b: int, kv_head: int) -> None:
    heads = slice(2 * kv_head, 2 * kv_head + 2)
    for name, hidden in (("q", heads), ("k", slice(kv_head, kv_head + 1)), ("v", slice(kv_head, kv_head + 1))):
        a, c = (_other_heads(r.grads[name], b, hidden) for r in (spoilt, clean))
        assert torch.equal(a, c), f"d{name}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_query_spoils_its_own_row_only(backend, device):
    clean, spoilt = _with_and_without(backend, device, ("q", 1, 12, 2), math.nan)
    assert spoilt.out[1, 12, 2].isnan().all()
    assert spoilt.lse[1, 2, 12].isnan()
    spoilt.out[1, 12, 2], spoilt.lse[1, 2, 12] = clean.out[1, 12, 2], clean.lse[1, 2, 12]
    assert torch.equal(spoilt.out, clean.out)
    assert torch.equal(spoilt.lse, clean.lse)
    _gradients_of_others_equal(clean, spoilt, 1, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_key_spoils_only_rows_that_see_it(backend, value, device):
    clean, spoilt = _with_and_without(backend, device, ("k", 0, 20, 1), value)
    sees = torch.zeros(clean.lse.shape, dtype=torch.bool, device=device)  # (B, H, Sq): rows from 12 on, heads 2 and 3
    sees[0, 2:, 12:] = True
    assert torch.equal(spoilt.lse[~sees], clean.lse[~sees])
    assert torch.equal(spoilt.out.transpose(1, 2)[~sees], clean.out.transpose(1, 2)[~sees])
    assert not spoilt.lse[sees].isfinite().all()
    if math.isnan(value):
        assert spoilt.lse[sees].isnan().all()
        assert spoilt.out.transpose(1, 2)[sees].isnan().all()
    _gradients_of_others_equal(clean, spoilt, 0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_value_stays_in_its_head(backend, device):
    clean, spoilt = _with_and_without(backend, device, ("v", 0, 20, 1), math.nan)
    assert torch.equal(spoilt.lse, clean.lse)
    heads = slice(2, 4)
    assert torch.equal(_other_heads(spoilt.out, 0, heads), _other_heads(clean.out, 0, heads))
    assert spoilt.out[0, 12:, 2:, 3].isnan().all()
    _gradients_of_others_equal(clean, spoilt, 0, 1)


def first_29(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
    return kv_idx < 29


def _hidden_keys(how: str, device: torch.device) -> tuple[dict, torch.Tensor]:
    """Options that hide some of 41 keys from all of 9 rows, and which keys."""
    key = torch.arange(41, device=device)
    return {
        "window": (dict(window=(3, None)), key < 41 - 9 - 3),
        "mask": (dict(mask=key % 7 != 2), key % 7 == 2),
        "mask_fn": (dict(mask=speedlight.Mask(first_29)), key >= 29),
        "bias": (dict(bias=torch.zeros(41, device=device).masked_fill(key % 7 == 2, -math.inf)), key % 7 == 2),
        "seqused": (dict(seqused_k=torch.tensor([29, 29], dtype=torch.int32, device=device)), key >= 29),
    }[how]


@pytest.mark.parametrize("how", ["window", "mask", "mask_fn", "bias", "seqused"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_nobody_sees_may_hold_nan(backend, how, device):
    """Within a tile of keys that are seen: 0 * NaN must not come out of P.V, dP or dS.K."""
    options, unseen = _hidden_keys(how, device)
    q, k, v = (torch.randn(2, n, 2, 16, device=device) for n in (9, 41, 41))
    dout, dlse = torch.randn_like(q), torch.randn(2, 2, 9, device=device)
    clean = _run(backend, CaseInputs(q, k, v, (), options), dout, dlse)
    k, v = k.clone(), v.clone()
    k[:, unseen] = v[:, unseen] = math.nan
    spoilt = _run(backend, CaseInputs(q, k, v, (), options), dout, dlse)
    torch.testing.assert_close(spoilt.out, clean.out)
    torch.testing.assert_close(spoilt.lse, clean.lse)
    for n, grad in spoilt.grads.items():
        torch.testing.assert_close(grad, clean.grads[n])
    assert (spoilt.grads["k"][:, unseen] == 0).all()
    assert (spoilt.grads["v"][:, unseen] == 0).all()


# Repeatability and rounding.


@pytest.mark.parametrize("name", ["long", "gqa_long", "dropout_gqa_causal", "combined", "combined_varlen", "bias_b__k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_runs_are_equal_bit_for_bit(backend, name, device):
    inputs = make_inputs(BY_NAME[name], device)
    dout, dlse = make_grads(BY_NAME[name], inputs)
    first = _run(backend, inputs, dout, dlse, deterministic=True)
    for _ in range(2):
        again = _run(backend, inputs, dout, dlse, deterministic=True)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)
        for n, grad in again.grads.items():
            assert torch.equal(grad, first.grads[n]), f"d{n}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_does_not_drift_one_way(backend, dtype, device):
    case = Case("drift", batch=2, seqlen_q=128, seqlen_k=128, num_heads=4, num_heads_kv=4, head_dim=64, dtype=dtype)
    inputs = make_inputs(case, device)
    dout, _ = make_grads(case, inputs)
    result = _run(backend, inputs, dout)
    exact = inputs.replace({n: t.double() for n, t in inputs.leaves.items()})
    expected = run(reference.attention, reference.attention_varlen, exact, dout)
    assert_unbiased(result.out, expected.out)
    for n, grad in result.grads.items():
        assert_unbiased(grad, expected.grads[n], f"d{n}")


# Derivatives by finite differences, where float64 exists.

_GRADCHECKED = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window=(2, 1)),
    "softcap": dict(softcap=1.2),
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1])),
    "bias": dict(bias=torch.randn(1, 2, 5, 6, dtype=torch.float64)),
    "bias_keys": dict(bias=torch.randn(2, 1, 1, 6, dtype=torch.float64)),
    "mask": dict(mask=torch.rand(2, 2, 5, 6) < 0.6),
    "sink": dict(sink=torch.randn(2, dtype=torch.float64)),
    "dropout": dict(dropout_p=0.4, dropout_seed=torch.tensor([77])),
    "seqused": dict(seqused_q=torch.tensor([3, 5]), seqused_k=torch.tensor([6, 2])),
    "most": dict(
        causal=True, window=(4, None), softcap=1.5, alibi_slopes=torch.tensor([0.3, 0.1]),
        bias=torch.randn(1, 2, 5, 6, dtype=torch.float64), sink=torch.randn(2, dtype=torch.float64),
        dropout_p=0.3, dropout_seed=torch.tensor([78]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("name", _GRADCHECKED)
def test_cpu_gradients_are_those_of_finite_differences(name, varlen):
    options = _GRADCHECKED[name]
    names = [n for n in ("bias", "sink") if n in options]
    q, k, v = (torch.randn(2, n, h, 3, dtype=torch.float64) for n, h in ((5, 2), (6, 1), (6, 1)))
    if varlen:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))

    def f(q, k, v, *rest):
        given = {**options, **dict(zip(names, rest, strict=True)), "return_lse": True, "backend": "cpu"}
        if varlen:
            cu = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
            out, lse = speedlight.attention_varlen(q, k, v, *cu, **given)
        else:
            out, lse = speedlight.attention(q, k, v, **given)
        return out, lse.masked_fill(lse == -math.inf, 0)

    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, *(options[n] for n in names))]
    assert torch.autograd.gradcheck(f, leaves, fast_mode=name != "most")


# Packed sequences are sequences on their own.


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "fa1"])
def test_packed_sequences_do_not_see_each_other(backend, device):
    lengths_q, lengths_k = (17, 0, 40, 8), (25, 6, 30, 13)
    alibi = "h" if backend == "cpu" else ""
    dtype, tolerance = (torch.float16, 1e-3) if backend == "fa3" else (torch.float32, 1e-5)
    case = Case(
        "packed", lengths_q=lengths_q, lengths_k=lengths_k, causal=True, alibi=alibi, num_heads=4, dtype=dtype
    )  # fmt: skip
    inputs = make_inputs(case, device)
    out, lse = inputs.call(speedlight.attention, speedlight.attention_varlen, backend=backend, return_lse=True)
    start_q = start_k = 0
    for n, m in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(start_q, start_q + n), slice(start_k, start_k + m)
        alone, alone_lse = speedlight.attention(
            inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys], backend=backend, return_lse=True,
            **inputs.options,
        )  # fmt: skip
        torch.testing.assert_close(out[rows], alone[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[:, rows], alone_lse[0], rtol=1e-5, atol=1e-5)
        start_q, start_k = start_q + n, start_k + m


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, 1e-46, 1e-36, -1e-46])
def test_a_scale_that_is_zero_in_fp32_averages_what_is_visible(backend, scale, device):
    dtype = torch.float32 if backend in ("cpu", "fa2") else torch.float16
    q, k, v = (torch.randn(1, 40, 2, 16, device=device, dtype=dtype) for _ in range(3))
    out, lse = speedlight.attention(q, k, v, softmax_scale=scale, causal=True, return_lse=True, backend=backend)
    count = torch.arange(1, 41, device=device).double()
    torch.testing.assert_close(lse.double(), count.log().expand(1, 2, 40), rtol=0, atol=1e-4)
    mean = v.double().cumsum(1) / count[:, None, None]
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=1e-5 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("fa2", "fa3")])
def test_cu_seqlens_that_do_not_start_at_0_leave_no_row_unwritten(backend, device):
    """An error on the CPU, where values can be read. Kernels take the first sequence to start at 0."""
    dtype = torch.float32 if backend == "fa2" else torch.float16
    q, k, v = (torch.randn(300, 2, 32, device=device, dtype=dtype) for _ in range(3))
    right, wrong = (torch.tensor([n, 220, 290], device=device, dtype=torch.int32) for n in (0, 150))
    problem, inputs = describe(q, k, v, right, right, causal=True)
    module = select.choose(problem, backend).module
    expected = module.forward(problem, inputs)
    found = module.forward(problem, inputs._replace(cu_seqlens_q=wrong, cu_seqlens_k=wrong))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
