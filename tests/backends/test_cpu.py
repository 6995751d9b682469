"""The cpu backend's two ways through a forward pass: with the rows' maxima, and without where no logit can be large."""

from __future__ import annotations

import math

import pytest
import torch

from speedlight import reference
from speedlight.backends import cpu, cpu_scores
from speedlight.problem import describe
from speedlight.testing import assert_close, assert_lse_close, naive_attention

LENGTH, DIM = 320, 16


@pytest.fixture
def answers(monkeypatch):
    """What each part said to whether its logits are small."""
    said = []
    ask = cpu_scores.Scores.are_small

    def listen(self, *args):
        said.append(ask(self, *args))
        return said[-1]

    monkeypatch.setattr(cpu_scores.Scores, "are_small", listen)
    return said


def _tensors(dtype, length=LENGTH, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, heads, DIM, generator=g).to(dtype) for _ in range(3)]


def _check(q, k, v, **options):
    problem, inputs = describe(q, k, v, **options)
    out, lse = cpu.forward(problem, inputs)
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    assert_close(out, expected, naive_attention(q, k, v, **options))
    assert_lse_close(lse, expected_lse, k.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (40, 9)},
        {"softcap": 30.0},
        {"dropout_p": 0.2, "dropout_seed": torch.tensor([5])},
    ],
    ids=str,
)
def test_small_logits_need_no_maxima(options, dtype, answers):
    _check(*_tensors(dtype), **options)
    assert set(answers) == {True}


def test_rows_without_a_visible_key(answers):
    """Their l is 0, and their v may be anything."""
    q, k, v = _tensors(torch.float32)
    mask = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[:, :, ::7] = False
    _check(q, k, v, mask=mask)
    assert set(answers) == {True}


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_logit_near_the_limit(dtype, sign, answers):
    """All of one size and sign: exp of the largest and of the smallest logits that take this way."""
    q, k, v = _tensors(dtype)
    length = math.sqrt(0.97 * cpu_scores.SMALL_LOGIT / cpu_scores.LOG2E * math.sqrt(DIM))
    q, k = (torch.nn.functional.normalize(1 + 0.1 * t.float(), dim=-1) * length for t in (q, k))
    q, k = q.to(dtype), (sign * k).to(dtype)
    _check(q, k, v * 2.0**-40 if sign < 0 else v * 2.0**29)
    assert set(answers) == {True}


@pytest.mark.parametrize("name", ["large q", "large k", "large v", "nan in v", "bias", "alibi", "sink", "short"])
def test_otherwise_the_maxima_are_taken(name, answers):
    q, k, v = _tensors(torch.float32, length=128 if name == "short" else LENGTH)
    options = {}
    if name == "large q":
        q[0, 7, 1] *= 100
    elif name == "large k":
        k[0, 7, 1] *= 100
    elif name == "large v":
        v = v * 2.0**100
    elif name == "nan in v":
        v[0, 7, 1, 3] = math.nan
    elif name == "bias":
        options["bias"] = torch.full((1, 1, 1, LENGTH), 300.0)
    elif name == "alibi":
        options["alibi_slopes"] = torch.tensor([-1.0, 1.0])
    elif name == "sink":
        options["sink"] = torch.tensor([300.0, -300.0])
    _check(q, k, v, **options)
    assert False in answers
