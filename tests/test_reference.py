"""The float64 oracle against torch's own attention and against loops over single rows, and the merge identities."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from cases import VALUES, all_but_every_third, prefix_lm, same_segment, weighted_distance
from torch.nn.attention import SDPBackend, sdpa_kernel

import speedlight
from speedlight import Bias, Mask, reference
from speedlight.testing import dropout_mask

INF = math.inf
torch.manual_seed(0)


def _qkv(batch=2, seqlen_q=7, seqlen_k=9, num_heads=2, num_heads_kv=2, head_dim=5, head_dim_v=None, std=1.0):
    q = torch.randn(batch, seqlen_q, num_heads, head_dim, dtype=torch.float64) * std
    k = torch.randn(batch, seqlen_k, num_heads_kv, head_dim, dtype=torch.float64) * std
    v = torch.randn(batch, seqlen_k, num_heads_kv, head_dim_v or head_dim, dtype=torch.float64)
    return q, k, v


def _close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, equal_nan=True)


# Against torch.


def _torch_attention(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _same_with_gradients(ours, theirs, *leaves):
    leaves = [t.detach().requires_grad_() for t in leaves]
    a, b = ours(*leaves), theirs(*leaves)
    _close(a, b)
    dout = torch.randn_like(a)
    for x, y in zip(torch.autograd.grad(a, leaves, dout), torch.autograd.grad(b, leaves, dout), strict=True):
        _close(x, y)


def test_plain_is_torch():
    _same_with_gradients(reference.attention, _torch_attention, *_qkv(head_dim_v=3))


def test_scale_is_torch():
    _same_with_gradients(
        lambda *x: reference.attention(*x, softmax_scale=0.9), lambda *x: _torch_attention(*x, scale=0.9), *_qkv()
    )


def test_causal_is_torch_where_the_alignments_agree():
    _same_with_gradients(
        lambda *x: reference.attention(*x, causal=True),
        lambda *x: _torch_attention(*x, is_causal=True),
        *_qkv(seqlen_q=8, seqlen_k=8),
    )


def test_causal_is_bottom_right_in_torch_masks():
    mask = torch.ones(4, 9, dtype=torch.bool).tril(9 - 4)
    _same_with_gradients(
        lambda *x: reference.attention(*x, causal=True),
        lambda *x: _torch_attention(*x, attn_mask=mask),
        *_qkv(seqlen_q=4),
    )


@pytest.mark.parametrize(("num_heads", "num_heads_kv"), [(6, 3), (6, 2), (4, 1)])
def test_grouped_heads_are_torch(num_heads, num_heads_kv):
    _same_with_gradients(
        reference.attention,
        lambda *x: _torch_attention(*x, enable_gqa=True),
        *_qkv(num_heads=num_heads, num_heads_kv=num_heads_kv),
    )


def test_bool_mask_is_torch():
    mask = torch.rand(2, 1, 7, 9) < 0.6
    mask[..., 0] = True
    _same_with_gradients(
        lambda *x: reference.attention(*x, mask=mask), lambda *x: _torch_attention(*x, attn_mask=mask), *_qkv()
    )


@pytest.mark.parametrize("shape", [(2, 2, 7, 9), (1, 2, 7, 9), (2, 1, 1, 9), (7, 9)])
def test_float_mask_is_torch(shape):
    _same_with_gradients(
        lambda q, k, v, b: reference.attention(q, k, v, bias=b),
        lambda q, k, v, b: _torch_attention(q, k, v, attn_mask=b),
        *_qkv(),
        torch.randn(shape, dtype=torch.float64),
    )


def test_bias_of_minus_infinity_hides_keys_as_in_torch():
    bias = torch.randn(7, 9, dtype=torch.float64).masked_fill(torch.rand(7, 9) < 0.4, -INF)
    bias[:, 0] = 0
    _same_with_gradients(
        lambda *x: reference.attention(*x, bias=bias), lambda *x: _torch_attention(*x, attn_mask=bias), *_qkv()
    )


# Against the definition, one row at a time.


def _row(q, keys, values, position, *, scale, left, right, softcap, slope, bias, mask, sink, kept, keep_scale):
    """out (Dv,) and lse of one query: q (D,), keys (Sk, D), values (Sk, Dv), the rest numbers or per-key lists."""
    scores = {}
    for j in range(len(keys)):
        hidden = (left is not None and j < position - left) or (right is not None and j > position + right)
        if hidden or not mask[j] or bias[j] == -INF:
            continue
        s = scale * sum(float(x) * float(y) for x, y in zip(q, keys[j], strict=True))
        s = softcap * math.tanh(s / softcap) if softcap else s
        scores[j] = s - slope * abs(position - j) + bias[j]
    total = sum(math.exp(s) for s in scores.values()) + (0.0 if sink is None else math.exp(sink))
    out = torch.zeros(values.shape[-1], dtype=torch.float64)
    for j, s in scores.items():
        out += math.exp(s) / total * (keep_scale if kept[j] else 0.0) * values[j]
    return out, math.log(total) if total else -INF


def _by_rows(b, q, k, v, *, causal=False, window=(None, None), softcap=0.0, softmax_scale=None, alibi_slopes=None,
             bias=None, mask=None, sink=None, keep=None, dropout_p=0.0):  # fmt: skip
    """One sequence, (Sq, H, D) etc.; bias, mask and keep are full (B, H, Sq, Sk)."""
    (seqlen_q, num_heads, head_dim), seqlen_k = q.shape, k.shape[0]
    out = torch.zeros(seqlen_q, num_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((num_heads, seqlen_q), -INF, dtype=torch.float64)
    for h in range(num_heads):
        kv_head = h * k.shape[1] // num_heads
        slope = 0.0 if alibi_slopes is None else float(alibi_slopes.view(-1, num_heads)[-1 if b else 0, h])
        for i in range(seqlen_q):
            out[i, h], lse[h, i] = _row(
                q[i, h], k[:, kv_head], v[:, kv_head], i + seqlen_k - seqlen_q,
                scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
                left=window[0], right=0 if causal else window[1], softcap=softcap, slope=slope,
                bias=[0.0] * seqlen_k if bias is None else bias[b, h, i].tolist(),
                mask=[True] * seqlen_k if mask is None else mask[b, h, i].tolist(),
                sink=None if sink is None else float(sink[h]),
                kept=[True] * seqlen_k if keep is None else keep[b, h, i].tolist(),
                keep_scale=1 / (1 - round(dropout_p * 65536) / 65536),
            )  # fmt: skip
    return out, lse


_OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window_left": dict(window=(2, None)),
    "window_right": dict(window=(None, 1)),
    "window_both": dict(window=(3, 2)),
    "window_causal": dict(window=(3, 5), causal=True),
    "scale": dict(softmax_scale=1.3),
    "softcap": dict(softcap=0.8),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.1])),
    "alibi_batched_causal": dict(alibi_slopes=torch.tensor([[0.5, 0.1], [0.3, 0.9]]), causal=True),
    "sink": dict(sink=torch.tensor([0.7, -2.0])),
    "sink_window": dict(sink=torch.tensor([0.7, -2.0]), window=(1, 0)),
    "bias": dict(bias=torch.randn(2, 2, 9, 9)),
    "mask": dict(mask=torch.rand(2, 2, 9, 9) < 0.4),
    "dropout": dict(keep=torch.rand(2, 2, 9, 9) < 0.7, dropout_p=0.3),
    "everything": dict(
        causal=True, window=(5, None), softcap=1.5, softmax_scale=0.8, alibi_slopes=torch.tensor([0.2, 0.4]),
        bias=torch.randn(2, 2, 9, 9), mask=torch.rand(2, 2, 9, 9) < 0.7, sink=torch.tensor([0.1, 0.5]),
        keep=torch.rand(2, 2, 9, 9) < 0.7, dropout_p=0.25,
    ),
}  # fmt: skip


def _fit(options, seqlen_q, seqlen_k):
    """The options for shorter sequences."""
    return {n: t[:, :, :seqlen_q, :seqlen_k] if n in ("bias", "mask", "keep") else t for n, t in options.items()}


@pytest.mark.parametrize("lengths", [(5, 8), (9, 4), (6, 6)], ids=str)
@pytest.mark.parametrize("name", _OPTIONS)
def test_dense_is_the_definition(name, lengths):
    q, k, v = _qkv(2, *lengths, num_heads_kv=1, head_dim=3, head_dim_v=2)
    options = _fit(_OPTIONS[name], *lengths)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    for b in range(2):
        rows, row_lse = _by_rows(b, q[b], k[b], v[b], **options)
        _close(out[b], rows)
        _close(lse[b], row_lse)


@pytest.mark.parametrize("name", _OPTIONS)
def test_used_lengths_are_the_definition_of_shorter_sequences(name):
    q, k, v = _qkv(2, 8, 9, head_dim=3)
    options = _fit(_OPTIONS[name], 8, 9)
    used_q, used_k = torch.tensor([5, 8]), torch.tensor([9, 3])
    q[0, 5:], k[1, 3:], v[1, 3:] = math.nan, math.nan, math.nan
    out, lse = reference.attention(q, k, v, seqused_q=used_q, seqused_k=used_k, return_lse=True, **options)
    for b, (n, m) in enumerate([(5, 9), (8, 3)]):
        rows, row_lse = _by_rows(b, q[b, :n], k[b, :m], v[b, :m], **options)
        _close(out[b, :n], rows)
        _close(lse[b, :, :n], row_lse)
        assert (out[b, n:] == 0).all()
        assert (lse[b, :, n:] == -INF).all()


@pytest.mark.parametrize("name", _OPTIONS)
def test_varlen_is_the_definition(name):
    cu_q, cu_k = [0, 5, 11], [0, 8, 8 + 4]
    q, k, v = (t[0] for t in _qkv(1, 13, 14, num_heads_kv=1, head_dim=3))
    q[11:], k[12:], v[12:] = math.nan, math.nan, math.nan
    options = _OPTIONS[name]
    out, lse = reference.attention_varlen(q, k, v, torch.tensor(cu_q), torch.tensor(cu_k), return_lse=True, **options)
    for b in range(2):
        n, m = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        rows, row_lse = _by_rows(b, q[n], k[m], v[m], **options)
        _close(out[n], rows)
        _close(lse[:, n], row_lse)
    assert (out[11:] == 0).all()
    assert (lse[:, 11:] == -INF).all()


def test_varlen_used_lengths_are_shorter_sequences():
    q, k, v = (t[0] for t in _qkv(1, 11, 12, head_dim=3))
    options = dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1]), return_lse=True)
    out, lse = reference.attention_varlen(
        q, k, v, torch.tensor([0, 5, 11]), torch.tensor([0, 8, 12]),
        seqused_q=torch.tensor([3, 6]), seqused_k=torch.tensor([8, 0]), **options,
    )  # fmt: skip
    alone, alone_lse = reference.attention(q[None, :3], k[None, :8], v[None, :8], **options)
    _close(out[:3], alone[0])
    _close(lse[:, :3], alone_lse[0])
    assert (out[3:] == 0).all()
    assert (lse[:, 3:] == -INF).all()


# Functions of positions are evaluated at rows within the sequence; aux values at rows of the tensors.


def _tabulate(fn, b, num_heads, seqlen_q, seqlen_k, aux=lambda h, i, j: ()):
    return torch.tensor(
        [[[fn(b, h, i, j, seqlen_q, seqlen_k, *aux(h, i, j)) for j in range(seqlen_k)] for i in range(seqlen_q)]
         for h in range(num_heads)]
    )[None]  # fmt: skip


@pytest.mark.parametrize("fn", [prefix_lm, all_but_every_third])
def test_mask_function_is_its_table(fn):
    q, k, v = _qkv(2, 5, 13)
    table = torch.cat([_tabulate(fn, b, 2, 5, 13) for b in range(2)])
    assert 0 < table.sum() < table.numel()
    _close(reference.attention(q, k, v, mask=Mask(fn)), reference.attention(q, k, v, mask=table))


def test_aux_values_belong_to_rows_of_the_packed_tensors():
    q, k, v = (t[0] for t in _qkv(1, 11, 12))
    head, row, key = torch.randn(2), torch.randn(11), torch.randn(12)
    bias = Bias(weighted_distance, [(axis, t) for (axis, _), t in zip(VALUES, (head, row, key), strict=True)])
    mask = Mask(same_segment, [("q", torch.arange(11) % 2), ("kv", torch.arange(12) % 2)])
    out = reference.attention_varlen(q, k, v, torch.tensor([0, 5, 11]), torch.tensor([0, 8, 12]), bias=bias, mask=mask)
    for b, (n, m) in enumerate([(slice(0, 5), slice(0, 8)), (slice(5, 11), slice(8, 12))]):
        lengths = (n.stop - n.start, m.stop - m.start)
        add = _tabulate(
            weighted_distance, b, 2, *lengths,
            lambda h, i, j, n=n, m=m: (head[h].item(), row[n.start + i].item(), key[m.start + j].item()),
        )  # fmt: skip
        see = (torch.arange(11) % 2)[n, None] == (torch.arange(12) % 2)[None, m]
        alone = reference.attention(q[None, n], k[None, m], v[None, m], bias=add.double(), mask=see)[0]
        torch.testing.assert_close(out[n], alone, rtol=1e-6, atol=1e-6)  # aux values are float32 numbers


def test_dropout_from_a_seed_is_dropout_with_its_mask():
    q, k, v = _qkv(2, 6, 8)
    seed = torch.tensor([1234567890123])
    keep = dropout_mask(seed, 0.3, 2, 2, 6, 8)
    assert 0 < keep.sum() < keep.numel()
    _close(
        reference.attention(q, k, v, dropout_p=0.3, dropout_seed=seed),
        reference.attention(q, k, v, dropout_p=0.3, keep=keep),
    )
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    cu_q, cu_k = torch.tensor([0, 6, 12]), torch.tensor([0, 8, 16])
    _close(
        reference.attention_varlen(*packed, cu_q, cu_k, dropout_p=0.3, dropout_seed=seed),
        reference.attention(q, k, v, dropout_p=0.3, keep=keep).flatten(0, 1),
    )


# Blind rows and unseen keys.


def test_blind_rows_and_unseen_keys_have_exact_zeros_and_may_hold_nan():
    q, k, v = _qkv(1, 6, 5)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[2], mask[:, 3] = False, False
    clean = reference.attention(q, k, v, mask=mask)
    q[:, 2], k[:, 3], v[:, 3] = math.nan, math.nan, math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*leaves, mask=mask, return_lse=True)
    _close(out, clean)
    assert (out[:, 2] == 0).all()
    assert (lse[..., 2] == -INF).all()
    assert lse[..., [0, 1, 3, 4, 5]].isfinite().all()
    dq, dk, dv = torch.autograd.grad((out * torch.randn_like(out)).sum() + (lse * torch.randn_like(lse)).sum(), leaves)
    assert all(t.isfinite().all() for t in (dq, dk, dv))
    assert (dq[:, 2] == 0).all()
    assert (dk[:, 3] == 0).all()
    assert (dv[:, 3] == 0).all()
    assert (dq[:, 1] != 0).any()


# Every order of derivative.


@pytest.mark.parametrize("name", _OPTIONS)
def test_derivatives_are_those_of_finite_differences(name):
    options = _fit(_OPTIONS[name], 3, 4)
    differentiable = {
        n: t.double().requires_grad_()
        for n, t in options.items()
        if isinstance(t, torch.Tensor) and t.dtype is not torch.bool
    }
    leaves = [t.requires_grad_() for t in _qkv(2, 3, 4, head_dim=2)]

    def f(q, k, v, *rest):
        given = {**options, **dict(zip(differentiable, rest, strict=True))}
        out, lse = reference.attention(q, k, v, return_lse=True, **given)
        return out, lse.masked_fill(lse == -INF, 0)

    tensors = (*leaves, *differentiable.values())
    assert torch.autograd.gradcheck(f, tensors, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, tensors, fast_mode=True)


# Merge.


def _parts(options=(), cuts=(0, 4, 4, 9)):
    q, k, v = _qkv(2, 6, 9)
    options = dict(options)
    whole = reference.attention(q, k, v, return_lse=True, **options)
    mask = options.pop("mask", torch.ones(6, 9, dtype=torch.bool))
    sink = options.pop("sink", None)
    parts = []
    for n, (a, b) in enumerate(itertools.pairwise(cuts)):
        first = dict(sink=sink) if n == 0 else {}  # the sink belongs to one part
        part = reference.attention(
            q, k[:, a:b], v[:, a:b], mask=mask[..., a:b], return_lse=True, **first, **options
        )  # fmt: skip
        parts.append(part)
    return whole, parts


@pytest.mark.parametrize(
    "options",
    [{}, dict(mask=torch.ones(6, 9, dtype=torch.bool).tril(1)), dict(sink=torch.tensor([0.3, 2.0])), dict(softcap=0.7)],
    ids=["plain", "mask", "sink", "softcap"],
)
def test_merged_parts_are_the_whole_in_any_order(options):
    (out, lse), parts = _parts(options)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        a, b, c = (parts[n] for n in order)
        for merged, merged_lse in (
            speedlight.merge(*speedlight.merge(*a, *b), *c),
            speedlight.merge(*a, *speedlight.merge(*b, *c)),
        ):
            _close(merged, out)
            _close(merged_lse, lse)


def test_merge_with_an_empty_part_is_the_other_part_exactly():
    out, lse = reference.attention(*_qkv(), return_lse=True)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -INF)  # its values count for nothing
    for merged, merged_lse in (speedlight.merge(out, lse, *empty), speedlight.merge(*empty, out, lse)):
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    zeros = torch.zeros_like(out), torch.full_like(lse, -INF)
    merged, merged_lse = speedlight.merge(*zeros, *zeros)
    assert (merged == 0).all()
    assert (merged_lse == -INF).all()


def test_merge_has_the_gradients_of_the_whole_and_zero_for_an_empty_part():
    leaves = [t.requires_grad_() for t in _qkv(1, 4, 6)]
    q, k, v = leaves
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False  # blind in both parts
    mask[2, :3] = False  # blind in the first
    dout, dlse = torch.randn(1, 4, 2, 5, dtype=torch.float64), torch.randn(1, 2, 4, dtype=torch.float64)

    def loss(out, lse):
        return (out * dout).sum() + (lse.masked_fill(lse == -INF, 0) * dlse).sum()

    whole = torch.autograd.grad(loss(*reference.attention(q, k, v, mask=mask, return_lse=True)), leaves)
    parts = [
        reference.attention(q, k[:, s], v[:, s], mask=mask[:, s], return_lse=True) for s in (slice(0, 3), slice(3, 6))
    ]
    for t in (t for part in parts for t in part):
        t.retain_grad()
    loss(*speedlight.merge(*parts[0], *parts[1])).backward()
    for ours, theirs in zip(leaves, whole, strict=True):
        _close(ours.grad, theirs)
    for part in parts:
        assert (part[0].grad[:, 1] == 0).all()
        assert (part[1].grad[..., 1] == 0).all()
    assert (parts[0][0].grad[:, 2] == 0).all()
