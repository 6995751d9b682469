"""The test tools themselves: they must fail on wrong results, or every other test is worth nothing."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from cases import BY_NAME, mixed_case

from speedlight import reference, testing
from speedlight.testing import (
    Case,
    assert_close,
    assert_lse_close,
    assert_unbiased,
    check,
    dropout_mask,
    make_grads,
    make_inputs,
)

EXACT = torch.tensor([1.0, -2.0, 3.0, 0.0], dtype=torch.float64)


def test_the_error_ratio_has_two_as_its_limit():
    naive = (EXACT + torch.tensor([0.0, 0.01, 0.0, 0.0])).bfloat16().float()
    error = (naive.double() - EXACT).abs().max().item()
    assert_close((EXACT + 1.99 * error).float(), EXACT, naive)
    with pytest.raises(AssertionError, match="error"):
        assert_close((EXACT - 2.02 * error).float(), EXACT, naive)


def test_without_a_yardstick_the_limit_is_a_part_of_the_largest_value():
    assert_close((EXACT + 2.9e-5).float(), EXACT)
    with pytest.raises(AssertionError, match=r"at \[1\] exceeds 3e-05"):
        assert_close((EXACT + torch.tensor([0, 3.2e-5, 0, 0])).float(), EXACT)
    with pytest.raises(AssertionError):
        assert_close(EXACT + 1e-10, EXACT)  # float64 has its own


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compare", [assert_close, lambda a, e: assert_lse_close(a, e, 4)], ids=["out", "lse"])
def test_nan_and_infinity_pass_only_where_expected(value, compare):
    special = EXACT.clone()
    special[1] = value
    compare(special.float(), special)
    for a, e in ((special, EXACT), (EXACT, special), (-special, special), (special, special.roll(1))):
        if not (a.isnan() & e.isnan()).any():
            with pytest.raises(AssertionError):
                compare(a.float(), e)


def test_a_yardstick_of_nan_allows_nothing():
    with pytest.raises(AssertionError):
        assert_close((EXACT + 0.1).float(), EXACT, torch.full_like(EXACT, math.nan))


def test_shapes_are_compared():
    for compare in (assert_close, lambda a, e: assert_lse_close(a, e, 4)):
        with pytest.raises(AssertionError, match="shape"):
            compare(EXACT[None].float(), EXACT)


def test_lse_tolerance():
    lse = torch.tensor([0.0, 10.0], dtype=torch.float64)
    assert_lse_close((lse + torch.tensor([1.9e-5, 1.1e-4])).float(), lse, 100)
    for off in ([2.2e-5, 0], [0, 1.4e-4]):
        with pytest.raises(AssertionError):
            assert_lse_close((lse + torch.tensor(off)).float(), lse, 100)


def test_a_drift_is_seen_below_the_noise():
    exact = torch.randn(100_000, dtype=torch.float64)
    noise = torch.randn(100_000, dtype=torch.float64) * 0.01
    assert_unbiased(exact + noise, exact)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_unbiased(exact + noise + 0.0003, exact)


# Wrong implementations, each wrong in one way.


def _oracle(q, k, v, *cu_seqlens, **options):
    function = reference.attention_varlen if cu_seqlens else reference.attention
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = function(q, k, v, *cu_seqlens, dtype=dtype, **options)
    return out.to(q.dtype), lse


def _without(name):
    def wrong(*args, **options):
        options.pop(name)
        return _oracle(*args, **options)

    return wrong


def _with(**changes):
    return lambda *args, **options: _oracle(*args, **{**options, **changes})


def _top_left(q, k, v, causal, **options):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    return _oracle(q, k, v, mask=mask, **options)


def _base_two(*args, **options):
    out, lse = _oracle(*args, **options)
    return out, lse / math.log(2)


def _no_lse_gradient(*args, **options):
    out, lse = _oracle(*args, **options)
    return out, lse.detach() + 0 * lse.masked_fill(lse.isinf(), 0)


def _scaled_gradient(which):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    def wrong(q, k, v, *cu, **options):
        q, k, v = (Scaled.apply(t) if name == which else t for name, t in (("q", q), ("k", k), ("v", v)))
        return _oracle(q, k, v, *cu, **{n: Scaled.apply(t) if n == which else t for n, t in options.items()})

    return wrong


def _seen_nothing_but_one(q, k, v, **options):
    """Blind rows of out not exactly zero."""
    out, lse = _oracle(q, k, v, **options)
    return out + 1e-12 * (lse == -math.inf).transpose(1, 2)[..., None], lse


def _halved(q, k, v, **options):
    out, lse = _oracle(q.half(), k.half(), v.half(), **options)
    return out.float(), lse


_WRONG = {
    "causal_top_left": ("causal_more_keys", _top_left),
    "causal_ignored": ("causal", _without("causal")),
    "window_one_more": ("window_both", _with(window=(8, 4))),
    "window_one_less": ("window_both", _with(window=(7, 3))),
    "scale": ("plain", _with(softmax_scale=0.26)),
    "softcap_ignored": ("softcap", _without("softcap")),
    "alibi_ignored": ("alibi", _without("alibi_slopes")),
    "bias_ignored": ("bias_b__k", _without("bias")),
    "mask_ignored": ("mask_b__k", _without("mask")),
    "mask_function_ignored": ("mask_fn", _without("mask")),
    "sink_ignored": ("sink", _without("sink")),
    "dropout_ignored": ("dropout", _without("dropout_p")),
    "dropout_seed": ("dropout", _with(dropout_seed=torch.tensor([3]))),
    "seqused_ignored": ("seqused_k", _without("seqused_k")),
    "lse_base": ("plain", _base_two),
    "lse_gradient": ("lse_grad", _no_lse_gradient),
    "blind_rows": ("causal_blind_rows", _seen_nothing_but_one),
    "precision": ("plain", _halved),
    **{f"d{n}": ("combined", _scaled_gradient(n)) for n in ("q", "k", "v", "alibi_slopes", "bias", "sink")},
    "dk_varlen": ("combined_varlen", _scaled_gradient("k")),
}


@pytest.mark.parametrize("name", _WRONG)
def test_check_finds_what_is_wrong(name):
    case, wrong = _WRONG[name]
    check(_oracle, BY_NAME[case])
    with pytest.raises(AssertionError):
        check(wrong, BY_NAME[case])


def test_check_finds_nan_from_rows_outside_the_sequences():
    """Whoever touches what lies behind seqused or the last sequence, or counts its output gradient, gets NaN."""
    inputs = make_inputs(BY_NAME["varlen_tail"])
    dout, dlse = make_grads(BY_NAME["combined_varlen"], make_inputs(BY_NAME["combined_varlen"]))
    assert inputs.q[-7:].isnan().all()
    assert inputs.v[-7:].isnan().all()
    assert inputs.q[:-7].isfinite().all()
    assert dout[-5:].isnan().all()
    assert dlse[:, -5:].isnan().all()
    used = make_inputs(BY_NAME["seqused_k"])
    assert used.k[1, 13:].isnan().all()
    assert used.k[1, :13].isfinite().all()


# Cases and their tensors.


@pytest.mark.parametrize(
    "layout", ["heads_first", "wide", "every_second_row", "stepped", "dim_outermost", "packed", "mixed"]
)
@pytest.mark.parametrize("name", ["heads_4_2", "varlen"])
def test_layouts_differ_in_memory_only(layout, name):
    plain, other = (make_inputs(replace(BY_NAME[name], layout=x, seqlen_k=17)) for x in ("contiguous", layout))
    for a, b in zip(plain[:3], other[:3], strict=True):
        assert torch.equal(a, b)
    assert any(not t.is_contiguous() for t in other[:3])
    assert (other.q.stride(-1) == 1) == (layout not in ("stepped", "dim_outermost"))


def test_the_same_seed_gives_the_same_tensors_and_another_one_others():
    case = BY_NAME["combined"]
    a, b, c = make_inputs(case, seed=3), make_inputs(case, seed=3), make_inputs(case, seed=4)
    for name, t in a.leaves.items():
        assert torch.equal(t, b.leaves[name])
        assert not torch.equal(t, c.leaves[name])
    assert set(a.leaves) == {"q", "k", "v", "alibi_slopes", "bias", "sink"}


def test_features_name_the_options_in_use():
    assert BY_NAME["plain"].features == {"float32"}
    assert BY_NAME["combined_bf16"].features >= {"bfloat16", "causal", "softcap", "alibi", "bias", "mask", "dv"}
    assert "varlen" in BY_NAME["varlen_gqa"].features


def test_mixed_cases_reach_every_option():
    features = frozenset().union(*(mixed_case(n).features for n in range(40)))
    every = Case("x").features.union(*(case.features for case in BY_NAME.values()))
    assert features >= every - {"bfloat16", "float16", "float64"}


def test_naive_attention_rounds_every_step():
    q, k, v = (torch.randn(1, 50, 1, 32) for _ in range(3))
    exact = reference.attention(q, k, v)
    single, half = (
        (testing.naive_attention(*(t.to(d) for t in (q, k, v))).double() - exact).abs().max()
        for d in (torch.float32, torch.bfloat16)
    )
    assert 0 < single < 1e-5
    assert 1e-3 < half < 0.1


def test_dropout_mask_has_its_rate_and_depends_on_every_index():
    keep = dropout_mask(torch.tensor([5]), 0.25, 2, 3, 64, 80)
    assert keep.shape == (2, 3, 64, 80)
    assert abs(keep.double().mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / keep.numel())
    for axis in range(4):
        assert not torch.equal(keep.select(axis, 0), keep.select(axis, 1))
    assert not torch.equal(keep, dropout_mask(torch.tensor([6]), 0.25, 2, 3, 64, 80))


# The fixtures.


def test_memory_that_speedlight_leaves_unwritten_holds_nan():
    source = "def make(x): return torch.empty(3), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (1,))"
    space = {"__name__": "speedlight.backends.some", "torch": torch}
    exec(source, space)
    for t in space["make"](torch.zeros(4)):
        assert t.isnan().all()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
def test_interpreter_rounds_bf16_to_nearest_even():
    import interpreter

    x = torch.cat([torch.randn(4096), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, math.nan, math.inf, 0.0, -3.4e38])])
    bits = interpreter._round(x.numpy())
    ours = torch.from_numpy(interpreter._widen(bits))
    torch.testing.assert_close(ours, x.bfloat16().float(), equal_nan=True, rtol=0, atol=0)
