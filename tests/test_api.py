"""The public functions around the kernels: merge, return values, warmup, seeds and generators, backends by name."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import speedlight
from speedlight import UnsupportedError, ops, reference
from speedlight.testing import dropout_mask

INF = math.inf


def qkv(batch=2, seqlen_q=6, seqlen_k=9, heads=4, heads_kv=2, dim=8, dtype=torch.float32):
    q = torch.randn(batch, seqlen_q, heads, dim, dtype=dtype)
    k, v = (torch.randn(batch, seqlen_k, heads_kv, dim, dtype=dtype) for _ in "kv")
    return q, k, v


def packed(*lengths):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = (t[0] for t in qkv(1, sum(lengths), sum(lengths)))
    return q, k, v, cu, cu


# What comes back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_out_and_lse_have_the_promised_shapes_and_dtypes(dtype):
    q, k, _ = qkv(dtype=dtype)
    v = torch.randn(2, 9, 2, 5, dtype=dtype)
    out, lse = speedlight.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 6, 4, 5), dtype, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.equal(speedlight.attention(q, k, v), out)
    cu = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    for b in range(2):
        packed_out, packed_lse = speedlight.attention_varlen(q[b], k[b], v[b], *cu, return_lse=True)
        assert packed_lse.shape == (4, 6)
        torch.testing.assert_close(packed_out, out[b], rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
        torch.testing.assert_close(packed_lse, lse[b])


def test_values_of_no_dimension_still_have_an_lse():
    q, k, _ = qkv()
    q.requires_grad_()
    out, lse = speedlight.attention(q, k, torch.zeros(2, 9, 2, 0), return_lse=True)
    assert out.shape == (2, 6, 4, 0)
    leaf = q.detach().double().requires_grad_()
    exact = reference.attention(leaf, k, torch.zeros(2, 9, 2, 0), return_lse=True)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)
    [dq], [expected] = torch.autograd.grad(lse.sum(), q), torch.autograd.grad(exact.sum(), leaf)
    torch.testing.assert_close(dq.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tensors", [packed(3)[:3], qkv()], ids=["packed", "dense"])
def test_varlen_without_sequences_is_no_dense_call(tensors):
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        speedlight.attention_varlen(*tensors, None, None)


def test_both_functions_take_the_same_options():
    keywords = [
        {n: (p.default, p.annotation) for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
        for f in (speedlight.attention, speedlight.attention_varlen)
    ]
    assert keywords[0] == keywords[1]
    assert keywords[0]


def test_what_the_package_exports_exists():
    for name in speedlight.__all__:
        assert getattr(speedlight, name) is not None


# Backends by name


def test_backend_cpu_is_the_definition_and_the_default_without_a_gpu():
    tensors = qkv()
    out = speedlight.attention(*tensors, causal=True, backend="cpu")
    torch.testing.assert_close(out.double(), reference.attention(*tensors, causal=True), rtol=1e-4, atol=1e-5)
    if speedlight.explain(*tensors).backend == "cpu":
        assert torch.equal(speedlight.attention(*tensors, causal=True), out)


def test_the_backend_asked_for_is_the_one_that_runs(monkeypatch):
    asked = []
    choose = speedlight.select.choose
    monkeypatch.setattr(speedlight.select, "choose", lambda problem, name: asked.append(name) or choose(problem, "cpu"))
    for name in (None, "cpu", "fa1", "fa2"):
        speedlight.attention(*qkv(), backend=name)
        speedlight.attention_varlen(*packed(3, 4), backend=name)
    assert asked == [None, None, "cpu", "cpu", "fa1", "fa1", "fa2", "fa2"]


# merge


def parts(dtype=torch.float64):
    """(whole, first part, second part) over 9 keys cut at 4; row 1 sees nothing of the first, row 2 of the second,
    row 3 nothing at all."""
    q, k, v = qkv(dtype=dtype)
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[1, :4] = mask[2, 4:] = mask[3] = False
    return [
        reference.attention(q, k[:, s], v[:, s], mask=mask[:, s], return_lse=True, dtype=dtype)
        for s in (slice(None), slice(0, 4), slice(4, 9))
    ]


def test_merge_is_the_whole():
    (out, lse), a, b = parts()
    for first, second in ((a, b), (b, a)):
        merged, merged_lse = speedlight.merge(*first, *second)
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    assert (merged_lse[:, :, 3] == -INF).all()
    assert (merged[:, 3] == 0).all()


def test_merge_with_nothing_on_either_side_is_the_other_part_bit_for_bit():
    out, lse = reference.attention(*qkv(), return_lse=True, dtype=torch.float32)
    for value in (0.0, 7.0, math.nan):
        nothing = torch.full_like(out, value), torch.full_like(lse, -INF)
        for merged, merged_lse in (speedlight.merge(out, lse, *nothing), speedlight.merge(*nothing, out, lse)):
            assert torch.equal(merged, out)
            assert torch.equal(merged_lse, lse)


def test_merge_of_a_part_with_itself_keeps_out_and_doubles_the_weight():
    (out, lse), *_ = parts()
    merged, merged_lse = speedlight.merge(out, lse, out, lse)
    assert torch.equal(merged, out)
    torch.testing.assert_close(merged_lse, lse + math.log(2.0))


def test_merge_is_commutative_and_associative_and_takes_packed_tensors():
    outs, lses = torch.randn(3, 7, 2, 4, dtype=torch.float64), torch.randn(3, 2, 7, dtype=torch.float64) * 5
    a, b, c = zip(outs, lses, strict=True)
    left = speedlight.merge(*speedlight.merge(*a, *b), *c)
    right = speedlight.merge(*a, *speedlight.merge(*c, *b))
    weights = lses.softmax(0).transpose(1, 2)[..., None]
    for merged, merged_lse in (left, right):
        torch.testing.assert_close(merged, (outs * weights).sum(0))
        torch.testing.assert_close(merged_lse, lses.logsumexp(0))


@pytest.mark.parametrize("distance", [0.0, 30.0, 90.0, 1e4, 3e38])
def test_merge_of_parts_far_apart_is_finite_with_finite_gradients(distance):
    out = [torch.full((1, 2, 1, 3), value).requires_grad_() for value in (1.0, 2.0)]
    lse = [torch.full((1, 1, 2), value).requires_grad_() for value in (-distance / 2, distance / 2)]
    for x, y in ((0, 1), (1, 0)):
        merged, merged_lse = speedlight.merge(out[x], lse[x], out[y], lse[y])
        weight = 1 / (1 + math.exp(-distance)) if distance < 700 else 1.0
        torch.testing.assert_close(merged, torch.full_like(merged, 1 + weight))
        torch.testing.assert_close(merged_lse, torch.full_like(merged_lse, distance / 2 - math.log(weight)))
        grads = torch.autograd.grad(merged.sum() + merged_lse.sum(), [*out, *lse])
        torch.testing.assert_close(grads[1], torch.full_like(grads[1], weight))
        assert all(g.isfinite().all() for g in grads)


def test_merge_gradients_are_those_of_finite_differences():
    _, a, b = parts()
    tensors = [t.detach().clone() for t in (*a, *b)]
    fixed = [lse == -INF for lse in tensors[1::2]]

    def f(out_a, lse_a, out_b, lse_b):
        # A part that is empty stays empty whatever its lse would be moved by.
        out, lse = speedlight.merge(out_a, lse_a.masked_fill(fixed[0], -INF), out_b, lse_b.masked_fill(fixed[1], -INF))
        return out, lse.masked_fill(lse == -INF, 0)

    leaves = [t.masked_fill(t == -INF, 0.0).requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


def test_merge_gives_an_empty_part_gradient_zero_even_if_it_holds_nan():
    _, a, b = parts()
    leaves = [t.detach().clone() for t in (*a, *b)]
    leaves[0][:, 1] = math.nan  # row 1 of the first part is empty
    leaves = [t.requires_grad_() for t in leaves]
    out, lse = speedlight.merge(*leaves)
    grads = torch.autograd.grad(out.sum() + lse[:, :, [0, 1, 2, 4, 5]].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 1] == 0).all()
    assert (grads[1][:, :, 1] == 0).all()
    assert (grads[2][:, 2] == 0).all()
    assert (grads[2][:, 1] == 1).all()


def test_merge_keeps_the_wider_dtype():
    out, lse = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 2)
    for one, other, wide in (
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
    ):
        merged, merged_lse = speedlight.merge(out.to(one), lse, out.to(other), lse)
        assert merged.dtype is wide
        assert merged_lse.dtype is torch.float32


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 3, 4), (1, 3, 2), (1, 2, 3, 5), (1, 3, 2)), r"one shape.*\(1, 2, 3, 4\) and \(1, 2, 3, 5\)"),
        (((1, 2, 3, 4), (1, 3, 2), (1, 2, 3, 4), (1, 3, 9)), r"one shape.*\(1, 3, 2\) and \(1, 3, 9\)"),
        (((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3)), r"lse must have shape \(1, 3, 2\).*got \(1, 2, 3\)"),
        (((2, 3, 4), (2, 3), (2, 3, 4), (2, 3)), r"lse must have shape \(3, 2\).*got \(2, 3\)"),
    ],
)
def test_merge_names_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        speedlight.merge(*map(torch.zeros, shapes))


# Seeds and generators


def test_dropout_draws_anew_each_time_from_torchs_own_generator():
    q, k, v = qkv()
    torch.manual_seed(5)
    first, second = (speedlight.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(speedlight.attention(q, k, v, dropout_p=0.5), first)
    assert torch.equal(speedlight.attention(q, k, v, dropout_p=0.5), second)
    torch.manual_seed(6)
    assert not torch.equal(speedlight.attention(q, k, v, dropout_p=0.5), first)


@pytest.mark.parametrize("varlen", [False, True])
def test_a_generator_draws_differently_each_time_and_reproduces(varlen):
    tensors, function = (packed(3, 4), speedlight.attention_varlen) if varlen else (qkv(), speedlight.attention)
    generator = torch.Generator().manual_seed(8)
    before = torch.get_rng_state()
    first, second = (function(*tensors, dropout_p=0.5, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(function(*tensors, dropout_p=0.5, generator=torch.Generator().manual_seed(8)), first)
    assert torch.equal(torch.get_rng_state(), before)  # the default generator is left alone


def test_a_given_seed_decides_and_nothing_is_drawn():
    q, k, v = qkv()
    before = torch.get_rng_state()
    out = speedlight.attention(q, k, v, dropout_p=0.25, dropout_seed=torch.tensor([9]))
    assert torch.equal(torch.get_rng_state(), before)
    keep = dropout_mask(torch.tensor([9]), 0.25, 2, 4, 6, 9)
    expected = reference.attention(q, k, v, dropout_p=0.25, keep=keep)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_without_dropout_nothing_is_drawn():
    tensors = qkv()
    before = torch.get_rng_state()
    speedlight.attention(*tensors)
    assert torch.equal(torch.get_rng_state(), before)


# warmup


@pytest.mark.parametrize("backward", [True, False])
def test_warmup_runs_each_problem_once_with_or_without_gradients(monkeypatch, backward):
    runs = []

    def noted(name):
        function = getattr(ops, f"run_{name}")
        return lambda p, *args: runs.append((name, p.varlen, p.softcap)) or function(p, *args)

    for name in ("forward", "backward"):
        monkeypatch.setattr(ops, f"run_{name}", noted(name))
    q, k, v = qkv()
    problems = [
        ((q, k, v), dict(softcap=2.0, return_lse=True)), (packed(3, 4), dict(causal=True)), ((*packed(2), 2, 2), {})
    ]  # fmt: skip
    with torch.no_grad():  # as the caller may be
        speedlight.warmup(problems, backward=backward)
    expected = [("forward", False, 2.0), ("forward", True, 0.0), ("forward", True, 0.0)]
    if backward:
        expected = [(name, *rest) for pass_, *rest in expected for name in (pass_, "backward")]
    assert runs == expected
    assert not q.requires_grad
    assert q.grad is None


def test_warmup_raises_what_the_call_would():
    with pytest.raises(ValueError, match="softcap"):
        speedlight.warmup([(qkv(), dict(softcap=-1.0))])
    if speedlight.explain(*qkv()).backend == "cpu":
        with pytest.raises(UnsupportedError, match="fa1"):
            speedlight.warmup([(qkv(), dict(backend="fa1"))])
