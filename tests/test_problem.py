"""Validation and the normal form: what ``describe`` refuses, in which words, and what it makes equal."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speedlight.problem
from speedlight import Bias, Mask
from speedlight.backends.contract import Inputs
from speedlight.problem import AttentionProblem, TensorSpec, describe

B, SQ, SK, H, HK, D, DV = 2, 5, 7, 4, 2, 8, 6


def see_all(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, *aux):
    return kv_idx >= 0


def no_bias(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, *aux):
    return 0.0 * kv_idx


def dense(**options):
    q, k, v = torch.zeros(B, SQ, H, D), torch.zeros(B, SK, HK, D), torch.zeros(B, SK, HK, DV)
    given_ = {n: options.pop(n) for n in ("q", "k", "v") if n in options}
    return describe(given_.get("q", q), given_.get("k", k), given_.get("v", v), **options)


def packed(cu_q=(0, 2, 5), cu_k=(0, 3, 7), max_q=None, max_k=None, **options):
    cu = (torch.tensor(c, dtype=torch.int32) if isinstance(c, tuple) else c for c in (cu_q, cu_k))
    q, k, v = torch.zeros(SQ, H, D), torch.zeros(SK, HK, D), torch.zeros(SK, HK, DV)
    return describe(q, k, v, *cu, max_q, max_k, **options)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


# (call, exception, what the message must name: the argument and both values)
REFUSED = {
    "q_dims": (lambda: dense(q=torch.zeros(SQ, H, D)), ValueError, ("q must have 4 dimensions", f"({SQ}, {H}, {D})")),
    "k_dims": (lambda: dense(k=torch.zeros(1)), ValueError, ("k must have 4 dimensions", "(1,)")),
    "v_dims_varlen": (
        lambda: describe(torch.zeros(SQ, H, D), torch.zeros(SK, HK, D), torch.zeros(1, 1), i32(0, 5), i32(0, 7)),
        ValueError, ("v must have 3 dimensions", "(1, 1)"),
    ),
    "mixed_dtypes": (
        lambda: dense(k=torch.zeros(B, SK, HK, D, dtype=torch.float16)), TypeError, ("one dtype", "float32", "float16"),
    ),
    "int_dtype": (
        lambda: describe(*[torch.zeros(1, 1, 1, 1, dtype=torch.int32)] * 3), TypeError, ("float32", "torch.int32"),
    ),
    "k_device": (lambda: dense(k=torch.zeros(B, SK, HK, D, device="meta")), ValueError, ("k must", "cpu", "meta")),
    "v_device": (lambda: dense(v=torch.zeros(B, SK, HK, DV, device="meta")), ValueError, ("v must", "cpu", "meta")),
    "head_dim": (lambda: dense(k=torch.zeros(B, SK, HK, D + 1)), ValueError, ("k must", str(D), str(D + 1))),
    "v_rows": (
        lambda: dense(v=torch.zeros(B, SK + 1, HK, DV)), ValueError,
        ("v must", f"({B}, {SK}, {HK})", f"({B}, {SK + 1}, {HK})"),
    ),
    "batch": (
        lambda: dense(k=torch.zeros(B + 1, SK, HK, D), v=torch.zeros(B + 1, SK, HK, DV)), ValueError,
        ("k must", "batch", str(B), str(B + 1)),
    ),
    "heads": (
        lambda: dense(k=torch.zeros(B, SK, 3, D), v=torch.zeros(B, SK, 3, DV)), ValueError, ("multiple", str(H), "3"),
    ),
    "no_kv_heads": (
        lambda: dense(k=torch.zeros(B, SK, 0, D), v=torch.zeros(B, SK, 0, DV)), ValueError, ("multiple", str(H), "0"),
    ),
    "head_dim_0": (
        lambda: dense(q=torch.zeros(B, SQ, H, 0), k=torch.zeros(B, SK, HK, 0)), ValueError, ("head dimension", "0"),
    ),
    "cu_seqlens_k_missing": (lambda: packed(cu_k=None), ValueError, ("cu_seqlens_k is missing",)),
    "cu_seqlens_q_missing": (lambda: packed(cu_q=None), ValueError, ("cu_seqlens_q is missing",)),
    "cu_seqlens_list": (lambda: packed(cu_q=[0, 2, 5]), TypeError, ("cu_seqlens_q must be a tensor", "list")),
    "cu_seqlens_float": (lambda: packed(cu_q=torch.zeros(3)), TypeError, ("cu_seqlens_q must be int32", "float32")),
    "cu_seqlens_dims": (
        lambda: packed(cu_k=torch.zeros(1, 3, dtype=torch.int32)), ValueError, ("cu_seqlens_k must", "(1, 3)"),
    ),
    "cu_seqlens_device": (
        lambda: packed(cu_q=torch.zeros(3, dtype=torch.int32, device="meta")), ValueError,
        ("cu_seqlens_q must", "cpu", "meta"),
    ),
    "cu_seqlens_none": (
        lambda: packed(cu_q=torch.zeros(0, dtype=torch.int32)), ValueError, ("cu_seqlens_q must have B + 1", "0"),
    ),
    "cu_seqlens_lengths": (lambda: packed(cu_q=(0, 5)), ValueError, ("cu_seqlens_q and cu_seqlens_k", "2", "3")),
    "cu_seqlens_start": (lambda: packed(cu_q=(1, 2, 5)), ValueError, ("cu_seqlens_q must start at 0", "[1, 2, 5]")),
    "cu_seqlens_decrease": (
        lambda: packed(cu_k=(0, 4, 3)), ValueError, ("cu_seqlens_k", "never decrease", "[0, 4, 3]"),
    ),
    "cu_seqlens_too_long": (lambda: packed(cu_k=(0, 3, 8)), ValueError, ("cu_seqlens_k", "7 tokens of k", "[0, 3, 8]")),
    "cu_seqlens_many": (
        lambda: packed(cu_q=(0,) * 20 + (9,), cu_k=(0,) * 21), ValueError, ("cu_seqlens_q", "5 tokens of q", "..."),
    ),
    "max_seqlen_small": (lambda: packed(max_q=2), ValueError, ("max_seqlen_q is 2", "3 tokens")),
    "max_seqlen_k_small": (lambda: packed(max_k=3), ValueError, ("max_seqlen_k is 3", "4 tokens")),
    "max_seqlen_negative": (lambda: packed(max_k=-1), ValueError, ("max_seqlen_k must", "-1")),
    "max_seqlen_float": (lambda: packed(max_q=3.0), ValueError, ("max_seqlen_q must", "3.0")),
    "max_seqlen_bool": (lambda: packed(max_q=True), ValueError, ("max_seqlen_q must", "True")),
    "seqused_entries": (lambda: dense(seqused_q=i32(1)), ValueError, ("seqused_q must", str(B), "1")),
    "seqused_dtype": (lambda: dense(seqused_k=torch.ones(B)), TypeError, ("seqused_k must be int32", "float32")),
    "seqused_dims": (
        lambda: dense(seqused_k=torch.ones(B, 1, dtype=torch.int32)), ValueError, ("seqused_k must", f"({B}, 1)"),
    ),
    "seqused_type": (lambda: dense(seqused_k=[1, 2]), TypeError, ("seqused_k must be a tensor", "list")),
    "seqused_large": (lambda: dense(seqused_q=i32(1, 6)), ValueError, ("seqused_q must", "[1, 6]", f"[{SQ}, {SQ}]")),
    "seqused_negative": (
        lambda: dense(seqused_k=i32(-1, 2)), ValueError, ("seqused_k must", "[-1, 2]", f"[{SK}, {SK}]"),
    ),
    "seqused_varlen": (lambda: packed(seqused_k=i32(3, 5)), ValueError, ("seqused_k must", "[3, 5]", "[3, 4]")),
    "scale_type": (lambda: dense(softmax_scale="1"), TypeError, ("softmax_scale must be a number", "str")),
    "scale_tensor": (lambda: dense(softmax_scale=torch.ones(1)), TypeError, ("softmax_scale must", "Tensor")),
    "scale_nan": (lambda: dense(softmax_scale=math.nan), ValueError, ("softmax_scale must be finite", "nan")),
    "softcap_negative": (lambda: dense(softcap=-1.0), ValueError, ("softcap must", "-1.0")),
    "softcap_inf": (lambda: dense(softcap=math.inf), ValueError, ("softcap must be finite", "inf")),
    "softcap_none": (lambda: dense(softcap=None), TypeError, ("softcap must be a number", "NoneType")),
    "causal_int": (lambda: dense(causal=2), TypeError, ("causal must be a bool", "int")),
    "causal_none": (lambda: dense(causal=None), TypeError, ("causal must be a bool", "NoneType")),
    "deterministic": (lambda: dense(deterministic="no"), TypeError, ("deterministic must be a bool", "str")),
    "window_int": (lambda: dense(window=3), ValueError, ("window must be a pair", "3")),
    "window_three": (lambda: dense(window=(1, 2, 3)), ValueError, ("window must be a pair", "(1, 2, 3)")),
    "window_negative": (lambda: dense(window=(-1, None)), ValueError, ("window sizes must not", "(-1, None)")),
    "window_float": (lambda: dense(window=(2.5, None)), TypeError, ("window sizes must be ints", "(2.5, None)")),
    "window_bool": (lambda: dense(window=(None, False)), TypeError, ("window sizes must be ints", "(None, False)")),
    "alibi_type": (lambda: dense(alibi_slopes=[1.0] * H), TypeError, ("alibi_slopes must be a tensor", "list")),
    "alibi_dtype": (
        lambda: dense(alibi_slopes=torch.ones(H, dtype=torch.float64)), TypeError, ("alibi_slopes must", "float64"),
    ),
    "alibi_shape": (
        lambda: dense(alibi_slopes=torch.ones(H + 1)), ValueError, ("alibi_slopes must", f"({B}, {H})", f"({H + 1},)"),
    ),
    "alibi_device": (
        lambda: dense(alibi_slopes=torch.ones(H, device="meta")), ValueError, ("alibi_slopes must", "cpu", "meta"),
    ),
    "sink_shape": (lambda: dense(sink=torch.ones(H, 1)), ValueError, ("sink must", f"({H},)", f"({H}, 1)")),
    "sink_dtype": (lambda: dense(sink=torch.ones(H, dtype=torch.int64)), ValueError, ("sink must", "int64")),
    "sink_type": (lambda: dense(sink=0.5), TypeError, ("sink must be a tensor", "float")),
    "bias_bool": (lambda: dense(bias=torch.ones(SQ, SK, dtype=torch.bool)), TypeError, ("bias must", "mask=", "bool")),
    "bias_type": (lambda: dense(bias=1.0), TypeError, ("bias must be a tensor", "float")),
    "bias_mask": (lambda: dense(bias=Mask(see_all)), TypeError, ("bias must be a tensor", "Mask")),
    "bias_shape": (
        lambda: dense(bias=torch.ones(SQ, SK + 1)), ValueError,
        ("bias must broadcast", f"({B}, {H}, {SQ}, {SK})", f"({SQ}, {SK + 1})"),
    ),
    "bias_heads": (
        lambda: dense(bias=torch.ones(HK, SQ, SK)), ValueError, ("bias must broadcast", f"({HK}, {SQ}, {SK})"),
    ),
    "bias_dims": (lambda: dense(bias=torch.ones(1, 1, 1, 1, 1)), ValueError, ("bias must broadcast", "5 dimensions")),
    "bias_varlen_short": (
        lambda: packed(max_q=3, max_k=4, bias=torch.ones(3, 3)), ValueError, ("bias must broadcast", "(3, 3)"),
    ),
    "bias_device": (lambda: dense(bias=torch.ones(SQ, SK, device="meta")), ValueError, ("bias must", "cpu", "meta")),
    "bias_aux_length": (
        lambda: dense(bias=Bias(no_bias, [("kv", torch.ones(SQ))])), ValueError,
        ("bias.aux[0]", "'kv'", str(SK), str(SQ)),
    ),
    "mask_aux_length": (
        lambda: dense(mask=Mask(see_all, [("q", torch.ones(SQ)), ("head", torch.ones(H + 1))])), ValueError,
        ("mask.aux[1]", "'head'", str(H), str(H + 1)),
    ),
    "mask_aux_device": (
        lambda: dense(mask=Mask(see_all, [("q", torch.ones(SQ, device="meta"))])), ValueError,
        ("mask.aux[0]", "cpu", "meta"),
    ),
    "mask_float": (lambda: dense(mask=torch.ones(SQ, SK)), TypeError, ("mask must be a bool", "float32")),
    "mask_bias": (lambda: dense(mask=Bias(no_bias)), TypeError, ("mask must be a tensor", "Bias")),
    "mask_shape": (
        lambda: dense(mask=torch.ones(B, SQ, SK, dtype=torch.bool)), ValueError,
        ("mask must broadcast", f"({B}, {H}, {SQ}, {SK})", f"({B}, {SQ}, {SK})"),
    ),
    "dropout_one": (lambda: dense(dropout_p=1.0), ValueError, ("dropout_p must be in [0, 1)", "1.0")),
    "dropout_negative": (lambda: dense(dropout_p=-0.1), ValueError, ("dropout_p must be in [0, 1)", "-0.1")),
    "dropout_type": (lambda: dense(dropout_p="0.1"), TypeError, ("dropout_p must be a number", "str")),
    "seed_int": (lambda: dense(dropout_p=0.1, dropout_seed=3), TypeError, ("dropout_seed must be a tensor", "int")),
    "seed_dtype": (
        lambda: dense(dropout_p=0.1, dropout_seed=i32(3)), ValueError, ("dropout_seed must be one int64", "int32"),
    ),
    "seed_count": (
        lambda: dense(dropout_p=0.1, dropout_seed=torch.zeros(2, dtype=torch.int64)), ValueError,
        ("dropout_seed must be one int64", "(2,)"),
    ),
    "seed_device": (
        lambda: dense(dropout_p=0.1, dropout_seed=torch.zeros(1, dtype=torch.int64, device="meta")), ValueError,
        ("dropout_seed must", "cpu", "meta"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_named_with_the_values(name):
    call, kind, parts = REFUSED[name]
    for _ in range(2):  # the second time past any cache
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        missing = [part for part in parts if part not in str(caught.value)]
        assert not missing, f"{caught.value} does not say {missing}"


def test_what_is_refused_is_otherwise_accepted():
    """The helpers of the table above are valid without their mistake."""
    assert dense()[0].group_size == H // HK
    assert packed()[0].varlen


# The same mistakes after an equal-looking valid call: a cache keyed by equality must not let them through.

ALIKE = {
    "causal": (lambda: dense(causal=True), lambda: dense(causal=1)),
    "causal_false": (lambda: dense(causal=False), lambda: dense(causal=0)),
    "scale": (lambda: dense(softmax_scale=1.0), lambda: dense(softmax_scale=True)),
    "softcap": (lambda: dense(softcap=1.0), lambda: dense(softcap=True)),
    "window_bool": (lambda: dense(window=(1, 0)), lambda: dense(window=(True, False))),
    "window_float": (lambda: dense(window=(1, 2)), lambda: dense(window=(1.0, 2.0))),
    "dropout": (lambda: dense(dropout_p=0.0), lambda: dense(dropout_p=False)),
    "max_seqlen": (lambda: packed(cu_q=(0, 1, 1), max_q=1), lambda: packed(cu_q=(0, 1, 1), max_q=True)),
    "max_seqlen_float": (lambda: packed(max_k=4), lambda: packed(max_k=4.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_a_valid_call_does_not_make_an_equal_looking_mistake_valid(name):
    valid, mistake = ALIKE[name]
    valid()
    with pytest.raises((TypeError, ValueError)):
        mistake()


def test_a_window_may_be_a_list():
    assert dense(window=[2, None])[0] == dense(window=(2, None))[0]
    with pytest.raises(ValueError, match="window sizes must not be negative"):
        dense(window=[-2, None])


# Normal form


def test_fields_of_a_dense_problem():
    problem, inputs = dense(softmax_scale=2, softcap=3)
    assert problem == AttentionProblem(
        device=torch.device("cpu"), dtype=torch.float32, batch=B, seqlen_q=SQ, seqlen_k=SK, num_heads=H,
        num_heads_kv=HK, head_dim=D, head_dim_v=DV, varlen=False, softmax_scale=2.0, window_left=None,
        window_right=None, softcap=3.0,
        alibi_batched=None, bias=None, mask=None, bias_fn=None, bias_axes=(), mask_fn=None, mask_axes=(), sink=False,
        seqused_q=False, seqused_k=False, dropout_threshold=0, deterministic=False, max_seqlen_q=None,
        max_seqlen_k=None, fp32_precision="ieee",
    )  # fmt: skip
    assert type(problem.softmax_scale) is float
    assert problem.lse_shape == (B, H, SQ)
    assert inputs == Inputs(*inputs[:3])


def test_fields_of_a_varlen_problem():
    problem, inputs = packed(max_q=3, max_k=torch.tensor(4))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, SQ, SK)
    assert (problem.max_seqlen_q, problem.max_seqlen_k) == (3, None)
    assert problem.lse_shape == (H, SQ)
    assert inputs.cu_seqlens_q.dtype is torch.int32


def test_default_scale_and_lse_dtype():
    assert dense()[0].softmax_scale == pytest.approx(1 / math.sqrt(D), rel=1e-15)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        problem, _ = describe(*[torch.zeros(1, 1, 1, 4, dtype=dtype)] * 3)
        assert problem.lse_dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


@settings(deadline=None, max_examples=300)
@given(
    seqlen_q=st.integers(0, 9), seqlen_k=st.integers(0, 9), left=st.none() | st.integers(0, 20),
    right=st.none() | st.integers(0, 20), causal=st.booleans(),
)  # fmt: skip
def test_normal_windows_hide_the_same_pairs(seqlen_q, seqlen_k, left, right, causal):
    """Folding causal in and dropping sides that hide nothing changes no pair; a side that remains hides some pair."""
    q, k = torch.zeros(1, seqlen_q, 1, 1), torch.zeros(1, seqlen_k, 1, 1)
    problem, _ = describe(q, k, k, window=(left, right), causal=causal)

    def hidden(left, right):
        return {
            (i, j)
            for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
            if (left is not None and j < i + seqlen_k - seqlen_q - left)
            or (right is not None and j > i + seqlen_k - seqlen_q + right)
        }

    given_right = 0 if causal else right
    assert hidden(problem.window_left, problem.window_right) == hidden(left, given_right)
    for side in ((problem.window_left, None), (None, problem.window_right)):
        if side != (None, None) and seqlen_q and seqlen_k:
            assert hidden(*side)


def test_causal_is_a_window():
    assert dense(causal=True)[0] == dense(window=(None, 0))[0] == dense(window=(None, 3), causal=True)[0]
    assert dense(causal=True)[0].causal
    assert not dense(causal=True, window=(2, None))[0].causal
    assert not dense()[0].causal
    # One query at the end of its keys has nothing to its right.
    one = describe(torch.zeros(1, 1, 1, 4), torch.zeros(1, 9, 1, 4), torch.zeros(1, 9, 1, 4), causal=True)[0]
    assert one.window_right is None


@pytest.mark.parametrize(
    ("p", "threshold"),
    [(0.0, 0), (2**-16, 1), (0.5, 1 << 15), (0.1, 6554), (1 - 2**-16, 65535), (1 - 2**-20, 65535), (2**-18, 0)],
)
def test_dropout_threshold_and_the_scale_it_realises(p, threshold):
    problem, inputs = dense(dropout_p=p, dropout_seed=torch.tensor([5]))
    assert problem.dropout_threshold == threshold
    assert problem.keep_scale * (65536 - threshold) == 65536
    assert (inputs.dropout_seed is not None) == (threshold > 0)


def test_optional_tensors_in_normal_form():
    options = dict(
        bias=torch.zeros(H, SQ, 1), mask=torch.ones(SK, dtype=torch.bool), sink=torch.zeros(H, dtype=torch.bfloat16),
        alibi_slopes=torch.zeros(B, H), seqused_k=torch.tensor([1, 2]), seqused_q=i32(1, 2),
    )  # fmt: skip
    problem, inputs = dense(**options)
    assert problem.bias == TensorSpec((1, H, SQ, 1), torch.float32)
    assert problem.mask == TensorSpec((1, 1, 1, SK), torch.bool)
    assert problem.sink and problem.seqused_q and problem.seqused_k
    assert problem.alibi_batched is True
    assert dense(alibi_slopes=torch.zeros(H))[0].alibi_batched is False
    assert inputs.bias.shape == (1, H, SQ, 1)
    assert inputs.bias.data_ptr() == options["bias"].data_ptr()
    assert inputs.seqused_k.dtype is torch.int32
    assert inputs.seqused_k.tolist() == [1, 2]


def test_functions_and_their_aux():
    mask = Mask(see_all, [("q", torch.ones(SQ)), ("kv", torch.ones(SK))])
    bias = Bias(no_bias, [("head", torch.ones(H))])
    problem, inputs = dense(mask=mask, bias=bias)
    assert (problem.mask_fn, problem.mask_axes) == (see_all, ("q", "kv"))
    assert (problem.bias_fn, problem.bias_axes) == (no_bias, ("head",))
    assert [t.shape[0] for t in inputs.mask_aux] == [SQ, SK]
    assert [t.shape[0] for t in inputs.bias_aux] == [H]
    assert problem.bias is None and problem.mask is None


def test_varlen_bias_reaches_the_longest_sequence():
    for shape in ((3, 4), (9, 9), (1, 4), (2, 1, 3, 4)):
        assert packed(max_q=3, max_k=4, bias=torch.zeros(shape))[0].bias.shape[-2:] == shape[-2:]
    assert packed(bias=torch.zeros(3, 4))[0].bias.shape == (1, 1, 3, 4)  # unknown maximum: the backend checks


def test_int64_lengths_are_converted():
    _, inputs = packed(cu_q=torch.tensor([0, 2, 5]), cu_k=torch.tensor([0, 3, 7]))
    assert inputs.cu_seqlens_q.dtype is inputs.cu_seqlens_k.dtype is torch.int32


# Identity and hash


def test_equal_calls_give_one_problem_and_different_ones_do_not():
    assert dense(softcap=2.0)[0] is dense(softcap=2.0)[0]
    assert hash(dense(softcap=2.0)[0]) == hash(dense(softcap=2)[0])
    variants = [
        {}, dict(softmax_scale=0.5), dict(softcap=2.0), dict(causal=True), dict(window=(2, None)),
        dict(window=(None, 2)), dict(sink=torch.zeros(H)), dict(alibi_slopes=torch.zeros(H)),
        dict(alibi_slopes=torch.zeros(B, H)),
        dict(bias=torch.zeros(SQ, SK)), dict(bias=torch.zeros(1, SK)), dict(bias=torch.zeros(SQ, SK).half()),
        dict(mask=torch.ones(SQ, SK, dtype=torch.bool)), dict(bias=Bias(no_bias)), dict(mask=Mask(see_all)),
        dict(mask=Mask(see_all, [("q", torch.ones(SQ))])), dict(mask=Mask(see_all, [("kv", torch.ones(SK))])),
        dict(seqused_q=i32(1, 1)), dict(seqused_k=i32(1, 1)), dict(dropout_p=0.5, dropout_seed=torch.tensor(1)),
        dict(dropout_p=0.25, dropout_seed=torch.tensor(1)), dict(deterministic=True),
    ]  # fmt: skip
    problems = [dense(**options)[0] for options in variants]
    for one, other in itertools.combinations(range(len(problems)), 2):
        assert problems[one] != problems[other], f"{variants[one]} and {variants[other]}"


def test_problem_is_frozen_and_every_field_counts():
    problem = dense()[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.batch = 3
    changed = dataclasses.replace(problem, batch=3)
    assert changed != problem
    assert hash(changed) != hash(problem)
    assert dataclasses.replace(changed, batch=problem.batch) == problem


def test_deterministic_mode_of_torch_counts():
    torch.use_deterministic_algorithms(True)
    try:
        assert dense()[0].deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not dense()[0].deterministic


def test_fp32_precision_follows_torch_and_is_no_matter_of_other_dtypes():
    half = [torch.zeros(1, 1, 1, 4, dtype=torch.float16)] * 3
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert dense()[0].fp32_precision == "tf32"
        assert describe(*half)[0].fp32_precision == "ieee"
        torch.backends.cuda.matmul.allow_tf32 = False
        assert dense()[0].fp32_precision == "ieee"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(speedlight.problem, "_PROBLEMS", {})
    monkeypatch.setattr(speedlight.problem, "_PROBLEMS_LIMIT", 3)
    for n in range(1, 8):
        assert dense(softcap=n)[0].softcap == n
        assert len(speedlight.problem._PROBLEMS) <= 3


# Strides


def test_strides_are_taken_as_they_are_and_a_strided_head_dimension_is_copied_with_one_warning(monkeypatch):
    monkeypatch.setattr(speedlight.problem, "_warned_copy", False)
    q = torch.randn(B, H, SQ, D).transpose(1, 2)
    k, v = torch.randn(B, SK, D, HK).transpose(2, 3), torch.randn(B, SK, DV, HK).transpose(2, 3)
    with pytest.warns(UserWarning, match=r"k has stride 2 along the head dimension and is copied") as caught:
        _, inputs = describe(q, k, v)
    assert len(caught) == 1
    assert inputs.q.data_ptr() == q.data_ptr()
    assert inputs.k.stride(-1) == inputs.v.stride(-1) == 1
    assert torch.equal(inputs.k, k)
    assert torch.equal(inputs.v, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        describe(q, k, v)
        narrow = torch.zeros(B, SQ, H, 2)[..., :1]  # one value: its stride says nothing
        describe(narrow, narrow, narrow)


def test_lengths_reach_the_kernels_one_after_the_other_however_they_lie():
    """An expanded seqused has stride 0, every second entry of a vector stride 2; kernels read entry b at b."""
    q = torch.zeros(3, 8, 1, 4)
    used = torch.tensor([5], dtype=torch.int32).expand(3)
    every_second = torch.tensor([0, 9, 4, 9, 12, 9], dtype=torch.int32)[::2]
    for dtype in (torch.int32, torch.int64):
        _, inputs = describe(q, q, q, seqused_q=used.to(dtype), seqused_k=used)
        assert inputs.seqused_q.is_contiguous() and inputs.seqused_k.is_contiguous()
        assert inputs.seqused_k.tolist() == [5, 5, 5]
        packed = torch.zeros(12, 1, 4)
        _, inputs = describe(packed, packed, packed, every_second.to(dtype), every_second)
        assert inputs.cu_seqlens_q.is_contiguous() and inputs.cu_seqlens_k.is_contiguous()
        assert inputs.cu_seqlens_k.tolist() == [0, 4, 12]
