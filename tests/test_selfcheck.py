"""The self-check must let right results pass and stop wrong ones, in each result and by each kind of fault."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from speedlight import ops, selfcheck
from speedlight.backends import cpu
from speedlight.backends.contract import Grads, Needs
from speedlight.problem import describe


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(selfcheck, "ENABLED", True)
    monkeypatch.setattr(selfcheck, "_done", set())


def backend(spoil_forward=lambda out, lse: (out, lse), spoil_backward=lambda grads: grads) -> ModuleType:
    module = ModuleType("speedlight.backends.other")
    module.forward = lambda *args: spoil_forward(*cpu.forward(*args))
    module.backward = lambda *args: spoil_backward(cpu.backward(*args))
    return module


def call(dtype=torch.bfloat16):
    q, k, v = (torch.randn(1, 9, 2, 16, dtype=dtype) for _ in range(3))
    return describe(q, k, v, window=(3, 0))


def rounded(out: torch.Tensor) -> torch.Tensor:
    """Another rounding of half of the values."""
    return torch.where(torch.rand(out.shape) < 0.5, out * (1 + torch.finfo(out.dtype).eps), out).to(out.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_right_results_pass(dtype):
    problem, inputs = call(dtype)
    other = backend(lambda out, lse: (rounded(out), lse), lambda grads: Grads(*map(rounded, grads[:3])))
    out, lse = ops.run_forward(problem, other, inputs)
    ops.run_backward(problem, other, inputs, out, lse, torch.randn_like(out), None, Needs())


def one_nan(t):
    t = t.clone()
    t.view(-1)[5] = float("nan")
    return t


def one_row(t):
    t = t.clone()
    t[0, 3] = t[0, 4]
    return t


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda out, lse: (out * 1.1, lse), "out"),
        (lambda out, lse: (one_nan(out), lse), "out"),
        (lambda out, lse: (one_row(out), lse), "out"),
        (lambda out, lse: (out, lse + 0.5), "lse"),
        (lambda out, lse: (out, lse.masked_fill(lse == lse.max(), float("-inf"))), "lse"),
    ],
)
def test_wrong_results_are_named(spoil, name):
    problem, inputs = call()
    with pytest.raises(RuntimeError, match=rf"other and cpu differ in {name} by"):
        ops.run_forward(problem, backend(spoil), inputs)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_gradients_are_named(which):
    problem, inputs = call()
    spoil = lambda grads: grads._replace(**{grads._fields[which]: one_row(grads[which])})  # noqa: E731
    out, lse = cpu.forward(problem, inputs)
    with pytest.raises(RuntimeError, match=f"differ in gradient of {'qkv'[which]} by"):
        ops.run_backward(
            problem, backend(spoil_backward=spoil), inputs, out, lse, torch.randn_like(out), None, Needs()
        )  # fmt: skip


def test_each_problem_is_checked_once_for_each_backend(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu, "forward", lambda *args, forward=cpu.forward: calls.append(args) or forward(*args))
    problem, inputs = call()
    right = ModuleType("speedlight.backends.right")
    right.forward = lambda problem, inputs: result
    result = cpu.forward(problem, inputs)
    calls.clear()
    for _ in range(3):
        ops.run_forward(problem, right, inputs)
    assert len(calls) == 1
    right.__name__ = "speedlight.backends.second"
    ops.run_forward(problem, right, inputs)
    assert len(calls) == 2
