"""Masks and biases as functions: what is refused, and how they cross an operator's schema."""

from __future__ import annotations

import functools

import pytest
import torch

from speedlight import Bias, Mask
from speedlight.modifiers import function_from_name, function_name


def first_three(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
    return kv_idx < 3


def with_values(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, row, key):
    return row * key


not_a_name = lambda b, h, q_idx, kv_idx, seqlen_q, seqlen_k: kv_idx < 3  # noqa: E731


class Holder:
    def method(self, b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
        return kv_idx < 3


def captured(limit):
    def closure(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
        return kv_idx < limit

    return closure


def nested():
    def local(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
        return kv_idx < 3

    return local


@pytest.mark.parametrize("kind", [Mask, Bias])
@pytest.mark.parametrize(
    "fn", [captured(3), nested(), not_a_name, lambda *args: True], ids=["closure", "local", "lambda", "inner_lambda"]
)
def test_functions_that_a_kernel_cannot_tell_apart_are_refused(kind, fn):
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*module-level function"):
        kind(fn)


@pytest.mark.parametrize("kind", [Mask, Bias])
@pytest.mark.parametrize(
    "fn", [3, None, functools.partial(first_three, 1), Holder().method, torch.add], ids=lambda f: type(f).__name__
)
def test_other_things_are_refused_by_type(kind, fn):
    with pytest.raises(TypeError, match=rf"{kind.__name__}.*{type(fn).__name__}"):
        kind(fn)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ([("row", torch.ones(3))], r"aux\[0\].*axis.*'row'"),
        ([("q", torch.ones(3)), ("kv", torch.ones(3, 2))], r"aux\[1\].*1-D.*'kv'.*\(3, 2\)"),
        ([("q", [1.0, 2.0])], r"aux\[0\].*1-D.*list"),
    ],
)
def test_aux_that_do_not_fit_are_named(aux, message):
    with pytest.raises(ValueError, match=message):
        Mask(first_three, aux)


def test_aux_that_would_need_a_gradient_say_so():
    with pytest.raises(NotImplementedError, match=r"Bias\.aux\[1\] requires grad.*detach"):
        Bias(with_values, [("q", torch.ones(3)), ("kv", torch.ones(3, requires_grad=True))])


def test_a_modifier_keeps_what_it_was_given():
    row, key = torch.ones(3), torch.ones(5)
    bias = Bias(with_values, [("q", row), ("kv", key)])
    assert bias.fn is with_values
    assert bias.axes == ("q", "kv")
    assert bias.aux[0][1] is row
    assert bias.aux[1][1] is key
    assert Mask(first_three).aux == ()


def test_a_name_leads_back_to_the_function():
    for fn in (first_three, with_values):
        assert function_from_name(function_name(fn)) is fn
