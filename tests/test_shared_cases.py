"""Behaviours drawn from reports about other attention libraries: what went wrong elsewhere must be right here.

The ids (c01 ...) are those of the collection the tests were written from; each docstring tells the failure.
"""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import speedlight
from speedlight import UnsupportedError, reference
from speedlight.testing import (
    CaseInputs,
    assert_close,
    assert_lse_close,
    assert_unbiased,
    compare,
    dropout_mask,
    naive_attention,
    run,
    run_reference,
)

INF = math.inf


@pytest.fixture(autouse=True)
def tensors_on_the_device(device):
    if device.type == "cpu":
        yield
    else:
        with device:
            yield


def _qkv(batch=2, seqlen_q=5, seqlen_k=None, heads=2, heads_kv=None, dim=16, dim_v=None, dtype=torch.float32, std=1.0):
    seqlen_k, heads_kv, dim_v = seqlen_k or seqlen_q, heads_kv or heads, dim_v or dim
    shapes = ((batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim_v))
    q, k, v = ((torch.randn(shape) * std).to(dtype) for shape in shapes)
    return q, k, v


def _agree(q, k, v, *cu_seqlens, lse_grad=False, dout=None, what="", **options):
    """Compare out, lse and every gradient with the reference, by the error-ratio rule; return our result."""
    inputs = CaseInputs(q, k, v, cu_seqlens, options)
    shape = (*q.shape[:-1], v.shape[-1])
    dout = torch.randn(shape).to(q.dtype) if dout is None else dout
    dlse = torch.randn(shape[:-1]).transpose(-1, -2) if lse_grad else None
    result = run(speedlight.attention, speedlight.attention_varlen, inputs, dout, dlse)
    compare(result, run_reference(inputs, dout, dlse), what or "attention", k.shape[-3])
    return result


def _near(actual, expected, tol=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tol, atol=tol)


def _cu(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _visible(seqlen_q, seqlen_k):
    """Bottom-right causal mask."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)


# Exactness


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c01_error_against_float64_at_large_scores(dtype):
    """Half precision lost more than a plain computation does, visible with inputs of standard deviation 10."""
    _agree(*_qkv(1, 240, heads=4, dim=128, std=10.0, dtype=dtype))


def test_c01_no_systematic_drift_in_rounding():
    """Rounding that leans one way adds up over a long bf16 training."""
    q, k, v = _qkv(1, 240, heads=8, dim=64, dtype=torch.bfloat16)
    inputs, dout = CaseInputs(q, k, v, (), {}), torch.randn(q.shape).bfloat16()
    result = run(speedlight.attention, speedlight.attention_varlen, inputs, dout)
    expected = run_reference(inputs, dout).expected
    assert_unbiased(result.out, expected.out)
    for name, grad in result.grads.items():
        assert_unbiased(grad, expected.grads[name], f"d{name}")


# Causal alignment and blind rows


def test_c03_causal_with_fewer_queries_is_bottom_right():
    """Decoding two tokens over five keys: the first sees four of them."""
    q, k, v = _qkv(1, 2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    _near(speedlight.attention(q, k, v, causal=True), reference.attention(q, k, v, mask=mask))
    _agree(q, k, v, causal=True)


def test_c04_causal_with_more_queries_leaves_blind_rows_at_zero():
    """NaN in dq where a row saw no key."""
    q, k, v = _qkv(1, 5, 2, std=3.0)
    result = _agree(q, k, v, causal=True)
    assert (result.out[:, :3] == 0).all()
    assert (result.lse[..., :3] == -INF).all()
    assert (result.grads["q"][:, :3] == 0).all()


def test_c04_packed_sequences_over_one_key_each():
    """The same in float16, packed: query lengths 76, 34, 146 over one key each."""
    q, k, v = (t[0] for t in _qkv(1, 256, 3, dtype=torch.float16, std=3.0))
    result = _agree(q, k, v, _cu([76, 34, 146]), _cu([1, 1, 1]), causal=True)
    seeing = [75, 76 + 33, 255]
    blind = torch.ones(256, dtype=torch.bool).index_fill(0, torch.tensor(seeing), False)
    assert (result.out[blind] == 0).all()
    assert (result.grads["q"][blind] == 0).all()
    assert torch.equal(result.out[seeing], v)


def test_c07_one_token_and_one_key():
    """dq was NaN in float16 for a single token."""
    q, k, v = _qkv(2, 1, heads=1, std=3.0, dtype=torch.float16)
    result = run(speedlight.attention, None, CaseInputs(q, k, v, (), {}), torch.ones_like(v))
    assert torch.equal(result.out, v)
    assert torch.equal(result.grads["v"], torch.ones_like(v))
    assert result.grads["q"].abs().max() < 1e-2
    assert result.grads["k"].abs().max() < 1e-2


# Masks and bias


def test_c09_rows_that_a_mask_hides_entirely():
    q, k, v = _qkv(1, 8, heads=1, dim=8)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    result = _agree(q, k, v, mask=mask)
    assert (result.out[:, 4:] == 0).all()
    for name in "qkv":
        assert (result.grads[name][:, 4:] == 0).all()
        assert (result.grads[name][:, :4] != 0).any()


def test_c10_a_row_biased_by_the_smallest_float_is_the_mean():
    """A finite "minus infinity" does not hide a key; it swallows the score."""
    q, k, v = _qkv(1, 4, heads=1)
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(4, 4)
    bias[1], bias[2, :2] = lowest, lowest
    out = speedlight.attention(q, k, v, bias=bias)
    _near(out[:, 1], v.mean(1))
    v[:, :2] += 100.0
    assert torch.equal(speedlight.attention(q, k, v, bias=bias)[:, 2], out[:, 2])  # weight exactly 0 in a mixed row


def test_c12_bias_with_odd_strides_and_offsets():
    """Kernels read 43 keys per row, an offset of one element, or a transposed bias wrongly."""
    q, k, v = _qkv(1, 16, 43)
    big = torch.randn(1, 2, 16, 48)
    transposed = big.transpose(2, 3).contiguous().transpose(2, 3)
    for bias in (big[..., :43].contiguous(), big[..., 1:44], transposed[..., :43], big.flip(1)[..., 2:45]):
        _agree(q, k, v, bias=bias)


@pytest.mark.parametrize(
    "shape", [(2, 4, 33, 19), (1, 4, 33, 19), (2, 1, 1, 19), (33, 19), (1, 4, 1, 1), (2, 4, 33, 1)]
)
def test_c13_the_gradient_of_a_bias_has_its_own_shape(shape):
    q, k, v = _qkv(2, 33, 19, heads=4, heads_kv=2)
    result = _agree(q, k, v, bias=torch.randn(shape), causal=True)
    assert result.grads["bias"].shape == shape
    expanded = _agree(q, k, v, bias=torch.randn(shape).expand(2, 4, 33, 19), causal=True)
    assert expanded.grads["bias"].shape == (2, 4, 33, 19)


# Heads


@pytest.mark.parametrize(
    ("heads", "heads_kv"), [(1, 1), (2, 1), (9, 3), (28, 7), (8, 1), (16, 2), (6, 3), (5, 5)]
)  # fmt: skip
def test_c18_query_head_h_reads_kv_head_h_over_group(heads, heads_kv):
    """Ratios that are not powers of two: wrong head, or dk and dv left unwritten."""
    q, k, v = _qkv(1, 7, 9, heads, heads_kv, 8)
    result = _agree(q, k, v)
    repeated = (t.repeat_interleave(heads // heads_kv, 2) for t in (k, v))
    _near(result.out, reference.attention(q, *repeated))


def test_c18_heads_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="7 and 3"):
        speedlight.attention(*_qkv(1, 4, heads=7, heads_kv=3))


@pytest.mark.parametrize(
    "dim", [1, 8, 16, 24, 33, 40, 56, 59, 64, 72, 80, 88, 96, 100, 112, 128, 160, 192, 256, 320, 512]
)
def test_c20_head_dimensions(dim):
    _agree(*_qkv(1, 3, 5, 1, dim=dim))


@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (64, 128), (128, 64), (40, 72), (576, 512)])
def test_c21_value_dimension_differs(dim, dim_v):
    """dq was silently wrong; and the default scale comes from q's dimension."""
    q, k, v = _qkv(1, 4, 6, 2, 1, dim, dim_v)
    assert _agree(q, k, v).out.shape == (1, 4, 2, dim_v)
    assert torch.equal(speedlight.attention(q, k, v), speedlight.attention(q, k, v, softmax_scale=dim**-0.5))


# Windows


def test_c23_a_wide_window_is_causal_bit_for_bit():
    q, k, v = _qkv(1, 64)
    causal = speedlight.attention(q, k, v, causal=True)
    for left in (None, 64, 63):
        assert torch.equal(speedlight.attention(q, k, v, window=(left, 0)), causal)
        assert torch.equal(speedlight.attention(q, k, v, window=(left, None), causal=True), causal)
    assert not torch.equal(speedlight.attention(q, k, v, window=(62, 0)), causal)  # row 63 loses key 0


def test_c24_a_window_counts_keys_inclusively():
    """A model's "sliding window of 4" is the own token and 3 before it."""
    q, k, _ = _qkv(1, 12, heads=1)
    weights = speedlight.attention(q, k, torch.eye(12)[None, :, None], causal=True, window=(3, None))
    assert (weights > 0).sum(-1).flatten().tolist() == [min(i + 1, 4) for i in range(12)]


@pytest.mark.parametrize("window", [(-1, -3), (-1, 0), (0, -1), (-2, None), (None, -1), (-1, -1)])
def test_c26_negative_windows_are_refused(window):
    """(-1, -3) was silently ignored."""
    with pytest.raises(ValueError, match="window"):
        speedlight.attention(*_qkv(), window=window)


def test_c26_causal_overrules_the_right_side():
    q, k, v = _qkv(1, 9)
    assert torch.equal(
        speedlight.attention(q, k, v, window=(3, 5), causal=True), speedlight.attention(q, k, v, window=(3, 0))
    )


def test_c27_a_window_larger_than_the_sequence_stays_causal():
    """Short prompts became bidirectional."""
    q, k, v = _qkv(1, 9)
    assert torch.equal(
        speedlight.attention(q, k, v, causal=True, window=(4096, 4096)), speedlight.attention(q, k, v, causal=True)
    )


# ALiBi, softcap, sink


@pytest.mark.parametrize("causal", [False, True])
def test_c29_alibi_is_minus_slope_times_distance_also_in_lse(causal):
    """A shift common to a row leaves out alone and moves lse, so training and decoding disagreed unnoticed."""
    q, k, v = _qkv(2, 3, 11, 4)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    distance = (torch.arange(3)[:, None] + 8 - torch.arange(11)).abs()
    out, lse = speedlight.attention(q, k, v, alibi_slopes=slopes, causal=causal, return_lse=True)
    expected, expected_lse = reference.attention(
        q, k, v, bias=-slopes[:, None, None] * distance, causal=causal, return_lse=True
    )
    _near(out, expected)
    _near(lse, expected_lse)
    packed = speedlight.attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)), _cu([3, 3]), _cu([11, 11]), alibi_slopes=slopes, causal=causal,
        return_lse=True,
    )  # fmt: skip
    _near(packed[0], expected.flatten(0, 1))
    _near(packed[1], expected_lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("heads", [3, 5, 12])
def test_c30_alibi_slopes_per_batch_entry_and_any_number_of_heads(heads):
    q, k, v = _qkv(2, 6, 9, heads)
    slopes = torch.rand(2, heads)
    result = _agree(q, k, v, alibi_slopes=slopes, causal=True, lse_grad=True)
    for b in range(2):
        one = slice(b, b + 1)
        alone = speedlight.attention(q[one], k[one], v[one], alibi_slopes=slopes[b], causal=True)
        _near(result.out[one], alone)


@pytest.mark.parametrize("softcap", [1.0, 15.0, 50.0])
def test_c32_softcap_and_its_derivative(softcap):
    """With scores far above the cap; below it a missing derivative goes unnoticed."""
    _agree(*_qkv(2, 12, 21, std=6.0), softcap=softcap, causal=True)


def test_c33_softcap_comes_before_the_mask():
    """The cap of a hidden score -inf would be -cap, which is not hidden."""
    q, k, _ = _qkv(1, 4, heads=1)
    weights = speedlight.attention(q, k, torch.eye(4)[None, :, None], softcap=2.0, causal=True)[0, :, 0]
    assert (weights.triu(1) == 0).all()
    assert (weights.tril() > 0).sum() == 10


def test_c34_sink_value_lse_gradient_and_blind_rows():
    q, k, v = _qkv(1, 5, 3)
    sink = torch.tensor([0.4, -1.0])
    result = _agree(q, k, v, sink=sink, causal=True, lse_grad=True)
    assert (result.out[:, :2] == 0).all()
    _near(result.lse[0, :, 0], sink, 1e-6)
    assert (result.grads["q"][:, :2] == 0).all()


# LSE


def test_c36_lse_is_natural_float32_and_heads_first():
    q, k, v = _qkv(2, 5, 7, 3)
    lse = speedlight.attention(q, k, v, return_lse=True)[1]
    assert lse.dtype is torch.float32
    _near(lse, torch.logsumexp(torch.einsum("bihd,bjhd->bhij", q, k) * 0.25, -1))
    zero = speedlight.attention(torch.zeros_like(q), k, v, causal=True, return_lse=True)[1]
    _near(zero, torch.arange(3, 8).log().expand(2, 3, 5))  # base 2 or a wrong scale would show
    half = speedlight.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), return_lse=True)[1]
    assert half.dtype is torch.float32


def test_c37_gradient_through_lse():
    _agree(*_qkv(1, 6, 8, 2, 1), causal=True, lse_grad=True)


def test_c37_a_loss_of_lse_alone():
    """The gradient of out is None, which crashed; and v has none."""
    leaves = [t.requires_grad_() for t in _qkv(1, 6, 8)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    ours = torch.autograd.grad(speedlight.attention(*leaves, causal=True, return_lse=True)[1].pow(2).sum(), leaves)
    exact = reference.attention(*doubles, causal=True, return_lse=True)[1].pow(2).sum()
    for a, b in zip(ours[:2], torch.autograd.grad(exact, doubles[:2]), strict=True):
        assert_close(a, b)
    assert (ours[2] == 0).all()


def test_c38_lse_of_blind_rows_is_minus_infinity_and_merges_away():
    q, k, v = _qkv(1, 6, 4, 1)
    packed = speedlight.attention_varlen(q[0], k[0], v[0], _cu([6]), _cu([4]), causal=True, return_lse=True)
    dense = speedlight.attention(q, k, v, causal=True, return_lse=True)
    assert (packed[1][:, :2] == -INF).all()
    assert (dense[1][..., :2] == -INF).all()
    out, lse = speedlight.attention(q, k, v, return_lse=True)
    merged, merged_lse = speedlight.merge(out[:, :2], lse[..., :2], dense[0][:, :2], dense[1][..., :2])
    assert torch.equal(merged, out[:, :2])
    assert torch.equal(merged_lse, lse[..., :2])
    merged, merged_lse = speedlight.merge(*[dense[0][:, :2], dense[1][..., :2]] * 2)
    assert (merged == 0).all()
    assert (merged_lse == -INF).all()


# Extreme numbers


def test_c40_all_scores_far_below_zero():
    """Zeros came out where every score was below a finite stand-in for -inf."""
    q, k, v = _qkv(1, 1, 8, 1, dim=128)
    q, k = torch.full_like(q, 440.0), k - 1800.0
    out, lse = speedlight.attention(q, k, v, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True)
    assert_close(out, expected, naive_attention(q, k, v))
    assert_lse_close(lse, expected_lse, 8)
    assert lse.max() < -5e4
    assert out.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c42_huge_scores_are_one_hot_and_ties_are_means(dtype):
    k = torch.eye(4, dtype=dtype)[None, :, None]
    v = torch.arange(4.0).to(dtype)[None, :, None, None].expand(1, 4, 1, 4)
    for big in (1e4, 3e4, -3e4):
        picked = speedlight.attention(k * big, k * (1 if big > 0 else -1), v, softmax_scale=1.0)
        assert torch.equal(picked, v)
    twice = torch.stack([k[0, 0], k[0, 0], k[0, 1], k[0, 2]])[None]
    assert torch.equal(
        speedlight.attention(k[:, :1] * 1e4, twice, v, softmax_scale=1.0), torch.full((1, 1, 1, 4), 0.5, dtype=dtype)
    )


def test_c43_nan_in_one_query_stays_in_its_row():
    q, k, v = _qkv(2, 6)
    clean = speedlight.attention(q, k, v)
    q[1, 2, 0] = math.nan
    out = speedlight.attention(q, k, v)
    assert out[1, 2, 0].isnan().all()
    out[1, 2, 0] = clean[1, 2, 0]
    assert torch.equal(out, clean)


def test_c44_nan_outside_the_valid_length_does_not_leak():
    q, k, v = _qkv(1, 4, 7, 1)
    short = [t[:, :5] for t in (k, v)]
    dout = torch.randn_like(q)
    expected = run(speedlight.attention, None, CaseInputs(q, *short, (), {}), dout)
    k[:, 5:] = v[:, 5:] = math.nan
    for options in (dict(mask=torch.arange(7) < 5), dict(seqused_k=torch.tensor([5]))):
        result = run(speedlight.attention, None, CaseInputs(q, k, v, (), options), dout)
        _near(result.out, expected.out)
        _near(result.grads["q"], expected.grads["q"])
        for name in "kv":
            _near(result.grads[name][:, :5], expected.grads[name])
            assert (result.grads[name][:, 5:] == 0).all()
    packed = speedlight.attention_varlen(q[0], k[0], v[0], _cu([4]), _cu([5]))
    _near(packed, expected.out[0])


def test_c46_merge_of_parts_far_apart():
    """exp overflowed when two parts' lse differed by 200."""
    one, two = torch.ones(1, 2, 1, 4), 2 * torch.ones(1, 2, 1, 4)
    lse = torch.zeros(1, 1, 2)
    for distance in (200.0, 1e4, 1e30):
        for a, b, larger in ((lse, lse + distance, two), (lse + distance, lse, one)):
            leaves = [t.detach().requires_grad_() for t in (one, a, two, b)]
            out, merged_lse = speedlight.merge(*leaves)
            assert torch.equal(out, larger)
            assert torch.equal(merged_lse, torch.full_like(lse, distance))
            grads = torch.autograd.grad(out.sum() + merged_lse.sum(), leaves)
            assert all(g.isfinite().all() for g in grads)


# Layout


def _views():
    packed, heads_first = torch.randn(2, 6, 3, 2, 16), torch.randn(2, 2, 6, 16)
    inner, wide, tall = torch.randn(2, 16, 2, 6), torch.randn(2, 6, 2, 32), torch.randn(2, 12, 2, 16)
    return {
        "packed": packed.unbind(2),
        "heads_first": [heads_first.transpose(1, 2)] * 3,
        "dim_not_last": [inner.permute(0, 3, 2, 1)] * 3,
        "every_second_value": [wide[..., ::2]] * 3,
        "every_second_row": [tall[:, ::2]] * 3,
    }


@pytest.mark.filterwarnings("ignore:.*is copied")
@pytest.mark.parametrize("name", ["packed", "heads_first", "dim_not_last", "every_second_value", "every_second_row"])
def test_c47_odd_strides_forward_and_backward(name):
    _agree(*_views()[name], causal=True)


@pytest.mark.filterwarnings("ignore:.*is copied")
def test_c47_odd_strides_of_the_output_gradient():
    """out.sum() sends a gradient of stride 0, a transpose one of stride(-1) != 1."""
    q, k, v = _qkv(2, 6)
    for dout in (torch.ones(()).expand(q.shape), torch.randn(2, 16, 2, 6).permute(0, 3, 2, 1)):
        _agree(q, k, v, dout=dout)


def test_c50_each_tensor_in_its_own_layout():
    """k contiguous and v not, and the other way round: one tensor's strides were used for the other."""
    q = torch.randn(2, 6, 2, 16)
    heads_first, wide = torch.randn(2, 2, 6, 16).transpose(1, 2), torch.randn(2, 6, 2, 20)[..., 2:18]
    for tensors in itertools.permutations((q, heads_first, wide)):
        _agree(*tensors)


# Varlen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([0, 3, 0, 5, 1, 0], [4, 0, 0, 6, 1, 2]), ([15, 0, 15], [10, 10, 10]), ([0, 12, 8, 0], [25, 17, 8, 30])],
)
def test_c56_zero_lengths_anywhere(lengths_q, lengths_k, causal):
    q, k, v = (t[0] for t in _qkv(1, sum(lengths_q), sum(lengths_k), 4, 2))
    cu_q, cu_k = _cu(lengths_q), _cu(lengths_k)
    result = _agree(q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), causal=causal)
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if m == 0:
            assert (result.out[cu_q[b] : cu_q[b + 1]] == 0).all()
        if n == 0:
            assert (result.grads["k"][cu_k[b] : cu_k[b + 1]] == 0).all()
            assert (result.grads["v"][cu_k[b] : cu_k[b + 1]] == 0).all()


def test_c58_rows_after_the_last_sequence():
    """Padding rows gave NaN gradients; NaN in their output gradient must not matter either."""
    q, k, v = (t[0] for t in _qkv(1, 12))
    dout = torch.randn(12, 2, 16)
    dout[10:] = math.nan
    result = _agree(q, k, v, torch.tensor([0, 4, 10]), torch.tensor([0, 4, 10]), dout=dout)
    assert (result.out[10:] == 0).all()
    assert (result.lse[:, 10:] == -INF).all()
    for grad in result.grads.values():
        assert (grad[10:] == 0).all()


def test_c60_max_seqlen_too_large_or_too_small():
    """A value that is too small cut off keys in silence."""
    q, k, v = (t[0] for t in _qkv(1, 12))
    cu = _cu([5, 7])
    expected = speedlight.attention_varlen(q, k, v, cu, cu)
    for longest in (7, 12, 10**6, torch.tensor(7), torch.tensor(10**6)):
        assert torch.equal(speedlight.attention_varlen(q, k, v, cu, cu, longest, longest), expected)
    assert torch.equal(speedlight.attention_varlen(q, k, v, cu, cu, torch.tensor(2), torch.tensor(2)), expected)
    with pytest.raises(ValueError, match="max_seqlen_q"):
        speedlight.attention_varlen(q, k, v, cu, cu, 6, 7)
    with pytest.raises(ValueError, match="max_seqlen_k"):
        speedlight.attention_varlen(q, k, v, cu, cu, 7, 6)


def test_c61_cu_seqlens_of_other_types_lengths_and_devices():
    q, k, v = (t[0] for t in _qkv(1, 12))
    cu = _cu([5, 7])
    assert torch.equal(
        speedlight.attention_varlen(q, k, v, cu.long(), cu.long()), speedlight.attention_varlen(q, k, v, cu, cu)
    )
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        speedlight.attention_varlen(q, k, v, cu, cu.float())
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k"):
        speedlight.attention_varlen(q, k, v, cu, _cu([5, 3, 4]))
    with pytest.raises(ValueError, match=r"cu_seqlens_k.*device"):
        speedlight.attention_varlen(q, k, v, cu, cu.to("meta"))
    for wrong in (torch.tensor([0, 5, 13]), torch.tensor([0, 7, 5]), torch.tensor([1, 5, 12])):
        with pytest.raises(ValueError, match="cu_seqlens_k must"):
            speedlight.attention_varlen(q, k, v, cu, wrong)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_c64_nothing_to_attend(batch, seqlen_q, seqlen_k, causal):
    """A division by zero killed the process."""
    leaves = [torch.randn(batch, n, 2, 8, requires_grad=True) for n in (seqlen_q, seqlen_k, seqlen_k)]
    out, lse = speedlight.attention(*leaves, causal=causal, return_lse=True)
    assert out.shape == (batch, seqlen_q, 2, 8)
    assert lse.shape == (batch, 2, seqlen_q)
    assert (out == 0).all()
    assert (lse == -INF).all()
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert grad.shape == leaf.shape
        assert (grad == 0).all()


# Dropout


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_c74_keep_rate_and_scaling(p):
    """Each weight is 0 or 1 / (Sk P(keep)); the rate holds overall, per row, per column and per 16 x 16 tile."""
    n = 512
    q = torch.zeros(1, n, 1, 8)
    options = dict(dropout_p=p, dropout_seed=torch.tensor([4242]))
    weights = speedlight.attention(q, q, torch.eye(n)[None, :, None], **options)[0, :, 0]
    keep = 1 - round(p * 65536) / 65536
    kept = weights > 0
    _near(weights[kept] * n * keep, torch.ones(int(kept.sum())))
    rate, tile = kept.double(), kept.double().view(32, 16, 32, 16)
    for means, count in ((rate.mean(), n * n), (rate.mean(0), n), (rate.mean(1), n), (tile.mean((1, 3)), 256)):
        assert (means - keep).abs().max() < 5 * math.sqrt(keep * (1 - keep) / count)
    assert not torch.equal(kept, speedlight.attention(
        q, q, torch.eye(n)[None, :, None], dropout_p=p, dropout_seed=torch.tensor([4243]))[0, :, 0] > 0)  # fmt: skip


def test_c74_no_dropout_is_bit_identical_to_no_dropout():
    q, k, v = _qkv()
    assert torch.equal(
        speedlight.attention(q, k, v, dropout_p=0.0, dropout_seed=torch.tensor([5])), speedlight.attention(q, k, v)
    )


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_c75_forward_and_backward_use_one_mask(varlen):
    """The mask read off a forward with v = identity is the one the gradients are made with."""
    p, seed = 0.3, torch.tensor([99])
    q, k, v = _qkv(2, 21, 37, 4, 2)
    options = dict(dropout_p=p, dropout_seed=seed, causal=True)
    cu = (_cu([21, 21]), _cu([37, 37])) if varlen else ()
    function = speedlight.attention_varlen if varlen else speedlight.attention

    def call(q, k, v):
        if varlen:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return function(q, k, v, *cu, **options).view(2, 21, 4, -1)

    identity = torch.eye(37)[None, :, None].expand(2, 37, 2, 37)
    dropped = (call(q, k, identity) == 0).transpose(1, 2)
    keep = ~dropped
    visible = _visible(21, 37).expand_as(keep)
    assert torch.equal(keep, dropout_mask(seed, p, 2, 4, 21, 37) & visible)
    leaves, doubles = ([t.detach().to(d).requires_grad_() for t in (q, k, v)] for d in (torch.float32, torch.float64))
    out, exact = call(*leaves), reference.attention(*doubles, keep=keep, dropout_p=p, causal=True)
    assert_close(out, exact)
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(exact, doubles, dout.double()), strict=True
    ):
        assert_close(a, b)


# Runtime behaviour


@pytest.mark.parametrize("mixed", [False, True], ids=["same", "mixed"])
def test_c83_autocast_casts_q_k_v_and_nothing_else(mixed, device):
    q, k, v = (t.requires_grad_() for t in _qkv())
    bias = torch.randn(5, 5, requires_grad=True)
    half = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    given = (half[0], k, v) if mixed else (q, k, v)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = speedlight.attention(*given, bias=bias)
    assert out.dtype is torch.bfloat16
    expected = speedlight.attention(*half, bias=bias)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for a, b, leaf in zip(
        torch.autograd.grad(out, (*given, bias), dout), torch.autograd.grad(expected, (*half, bias), dout),
        (*given, bias), strict=True,
    ):  # fmt: skip
        assert a.dtype is leaf.dtype
        assert torch.equal(a, b.to(a.dtype))
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        speedlight.attention(half[0], k, v)


@pytest.mark.parametrize("need", [need for need in itertools.product([False, True], repeat=3) if any(need)])
def test_c84_only_some_inputs_require_grad(need):
    tensors = _qkv()
    every = run(speedlight.attention, None, CaseInputs(*tensors, (), {}), torch.ones_like(tensors[0]))
    leaves = [t.requires_grad_(n) for t, n in zip(tensors, need, strict=True)]
    speedlight.attention(*leaves).sum().backward()
    for name, leaf, needed in zip("qkv", leaves, need, strict=True):
        assert (leaf.grad is not None) == needed
        if needed:
            _near(leaf.grad, every.grads[name])


def test_c85_lse_without_gradients():
    """lse was returned only when gradients were needed."""
    q, k, v = _qkv()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = speedlight.attention(*leaves, return_lse=True)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            again, again_lse = speedlight.attention(*leaves, return_lse=True)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
        assert not again.requires_grad


def test_c86_double_backward_is_right_or_names_the_way_round():
    """Never a silent zero. The way round is the reference, whose gradient penalty must then work."""
    leaves = [t.requires_grad_() for t in _qkv(1, 4)]
    (dq,) = torch.autograd.grad(speedlight.attention(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"speedlight\.reference\.attention"):
        dq.pow(2).sum().backward()
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    (dq,) = torch.autograd.grad(reference.attention(*doubles).sum(), doubles[0], create_graph=True)
    penalty = torch.autograd.grad(dq.pow(2).sum(), doubles)
    assert all((g != 0).any() for g in penalty)


def test_c87_forward_mode_is_right_or_names_the_way_round():
    q, k, v = (t.double() for t in _qkv(1, 3))
    t = torch.randn_like(q)
    with pytest.raises(NotImplementedError, match=r"speedlight\.reference\.attention"):
        torch.func.jvp(lambda x: speedlight.attention(x, k, v), (q,), (t,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="reference"):
        # Nothing requires grad here; the tangent alone must be noticed, not dropped.
        speedlight.attention(torch.autograd.forward_ad.make_dual(q, t), k, v)
    _, tangent = torch.func.jvp(lambda x: reference.attention(x, k, v), (q,), (t,))
    step = (reference.attention(q + 1e-6 * t, k, v) - reference.attention(q - 1e-6 * t, k, v)) / 2e-6
    _near(tangent, step, 1e-6)


def test_c87_vmap_is_a_loop():
    q, k, v = (torch.randn(3, 2, n, 2, 8) for n in (4, 6, 6))
    mapped = torch.vmap(lambda a, b, c: speedlight.attention(a, b, c, causal=True))(q, k, v)
    assert torch.equal(mapped, torch.stack([speedlight.attention(*x, causal=True) for x in zip(q, k, v, strict=True)]))
    shared = torch.vmap(lambda a: speedlight.attention(a, k[0], v[0]), in_dims=1, out_dims=1)(q.transpose(0, 1))
    assert torch.equal(shared, torch.stack([speedlight.attention(a, k[0], v[0]) for a in q], 1))
    grads = torch.vmap(torch.func.grad(lambda a, b, c: speedlight.attention(a, b, c).pow(2).sum()))(q, k, v)
    x = q.detach().requires_grad_()
    loss = sum(speedlight.attention(*t).pow(2).sum() for t in zip(x, k, v, strict=True))
    _near(grads, torch.autograd.grad(loss, x)[0])


def test_c88_inputs_keep_their_bytes():
    q, k, v = _qkv(2, 5, 7, 4, 2)
    options = dict(
        bias=torch.randn(1, 4, 5, 7), alibi_slopes=torch.rand(4), sink=torch.randn(4), mask=torch.rand(5, 7) < 0.8,
        seqused_k=torch.tensor([7, 4], dtype=torch.int32), dropout_p=0.2, dropout_seed=torch.tensor([3]),
    )  # fmt: skip
    dout = torch.randn_like(q)
    tensors = [q, k, v, dout, *(t for t in options.values() if isinstance(t, torch.Tensor))]
    before = [t.clone() for t in tensors]
    run(speedlight.attention, None, CaseInputs(q, k, v, (), options), dout, torch.randn(2, 4, 5))
    assert all(map(torch.equal, tensors, before))


# Padding masks


@pytest.mark.parametrize("keep", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 1, 0, 1, 1]], ids=str)
def test_c92_padded_left_right_or_in_between_is_as_alone(keep):
    """Left padding became visible, or holes in a mask were treated as a length."""
    keep = torch.tensor(keep, dtype=torch.bool)
    alone = _qkv(1, int(keep.sum()))
    padded = [torch.full((1, 5, 2, 16), 7.0).index_copy(1, keep.nonzero()[:, 0], t) for t in alone]
    dout = torch.randn(1, 5, 2, 16)
    mask = keep[:, None] & keep[None]  # padded rows see nothing
    expected = run(speedlight.attention, None, CaseInputs(*alone, (), dict(causal=True)), dout[:, keep])
    result = run(speedlight.attention, None, CaseInputs(*padded, (), dict(causal=True, mask=mask)), dout)
    _near(result.out[:, keep], expected.out)
    assert (result.out[:, ~keep] == 0).all()
    for name, grad in result.grads.items():
        _near(grad[:, keep], expected.grads[name])
        assert (grad[:, ~keep] == 0).all()


def test_c93_a_key_padding_mask_in_cross_attention():
    """The query was cut by the keys' mask."""
    q, k, v = _qkv(2, 4, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 2:] = False
    out = _agree(q, k, v, mask=mask[:, None, None]).out
    _near(out[:1], reference.attention(q[:1], k[:1], v[:1]))
    _near(out[1:], reference.attention(q[1:], k[1:, :2], v[1:, :2]))


# Choosing and explaining


def test_c97_explain_says_which_backend_runs_and_why_not_the_others():
    q, k, v = _qkv()
    found = speedlight.explain(q, k, v, causal=True)
    assert found.backend in ("cpu", "fa2")
    assert set(found.refused) == {"cpu", "fa1", "fa2", "fa3"} - {found.backend}
    assert all(found.refused.values())
    packed = speedlight.explain(q[0], k[0], v[0], _cu([5]), _cu([5]), causal=True)
    assert packed.backend == found.backend
    assert packed.problem.varlen


def test_c97_a_backend_that_was_asked_for_runs_or_raises_and_no_argument_is_ignored():
    q, k, v = _qkv()
    found = speedlight.explain(q, k, v)
    if found.backend == "cpu":
        for name in ("fa1", "fa2", "fa3"):
            with pytest.raises(UnsupportedError, match=name):
                speedlight.attention(q, k, v, backend=name)
    with pytest.raises(ValueError, match="backend"):
        speedlight.attention(q, k, v, backend="fast")
    with pytest.raises(TypeError, match="is_causal"):
        speedlight.attention(q, k, v, is_causal=True)
    plain = speedlight.attention(q, k, v)
    changing = dict(
        softmax_scale=0.7, causal=True, window=(1, 1), softcap=0.5, alibi_slopes=torch.rand(2), bias=torch.randn(5, 5),
        mask=_visible(5, 5), sink=torch.zeros(2), seqused_q=torch.tensor([2, 3]), seqused_k=torch.tensor([2, 3]),
        dropout_p=0.5,
    )  # fmt: skip
    for name, value in changing.items():
        assert not torch.equal(speedlight.attention(q, k, v, **{name: value}), plain), name
    neutral = {"dropout_seed", "generator", "deterministic", "return_lse", "backend"}
    keywords = {
        name for name, p in inspect.signature(speedlight.attention).parameters.items() if p.kind is p.KEYWORD_ONLY
    }  # fmt: skip
    assert keywords == set(changing) | neutral  # a new option needs a line above


# Sharded sequences


def _rank_rows(order, cuts):
    """The rows of each rank: contiguous pieces, or from both ends so that causal work is even."""
    pieces = [torch.arange(a, b) for a, b in itertools.pairwise(cuts)]
    if order == "contiguous":
        return pieces
    return [torch.cat([pieces[n], pieces[-1 - n]]) for n in range(len(pieces) // 2)]


@pytest.mark.parametrize("sequences", [[23], [9, 3, 11]], ids=["one", "packed"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_c98_parts_over_uneven_ranks_merge_to_the_whole(order, sequences):
    """Every rank attends to each rank's keys in turn and merges; pieces of 5, 0, 11 and 7 rows."""
    leaves = [t.double().requires_grad_() for t in _qkv(1, 23, heads=4, heads_kv=2)]
    q, k, v = leaves
    document = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(sequences))
    visible = _visible(23, 23) & (document[:, None] == document[None])
    exact, exact_lse = reference.attention(q, k, v, mask=visible, return_lse=True)
    ranks = _rank_rows(order, [0, 5, 5, 16, 23])
    out, lse = torch.zeros_like(exact), torch.zeros_like(exact_lse)
    for rows in ranks:
        part = torch.zeros_like(exact[:, rows]), torch.full_like(exact_lse[..., rows], -INF)
        for keys in ranks:
            partial = speedlight.attention(
                q[:, rows], k[:, keys], v[:, keys], mask=visible[rows][:, keys], return_lse=True
            )  # fmt: skip
            part = speedlight.merge(*part, *partial)
        out, lse = out.index_copy(1, rows, part[0]), lse.index_copy(2, rows, part[1])
    _near(out, exact, 1e-9)
    _near(lse, exact_lse, 1e-9)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for a, b in zip(
        torch.autograd.grad([out, lse], leaves, [dout, dlse]),
        torch.autograd.grad([exact, exact_lse], leaves, [dout, dlse]),
        strict=True,
    ):
        _near(a, b, 1e-9)


def test_a_packed_call_is_one_call_per_sequence_in_torch():
    """Guards the helpers of this file: the numbers above are torch's own where torch has the feature."""
    q, k, v = (t[0] for t in _qkv(1, 12))
    out = speedlight.attention_varlen(q, k, v, _cu([5, 7]), _cu([5, 7]), causal=True)
    for rows in (slice(0, 5), slice(5, 12)):
        x = (t[None, rows].transpose(1, 2) for t in (q, k, v))
        _near(out[rows], F.scaled_dot_product_attention(*x, is_causal=True)[0].transpose(0, 1))
