"""With SPEEDLIGHT_SELF_CHECK=1: the first result of each backend on each problem is compared with the `cpu` backend's.

Compilers make mistakes, and no test suite has your shapes, driver and compiler. The check computes every new problem a
second time, in plain torch operations on the same device, forward and backward, and raises where the two differ by more
than rounding explains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import cpu
from .backends.contract import Grads, Inputs, Needs
from .problem import AttentionProblem

ENABLED = os.environ.get("SPEEDLIGHT_SELF_CHECK") == "1"

# In roundings of the result's dtype: of the difference in the mean, and of the largest difference. Two right results
# differ by 1 to 2 and by up to 8.
_MEAN, _LARGEST = 8, 64
_done: set[Any] = set()


def check_forward(problem: AttentionProblem, backend: Any, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    if _wanted(problem, backend, "forward"):
        expected = cpu.forward(problem, inputs)
        _compare(problem, backend, ("out", "lse"), (out, lse), expected)


def check_backward(
    problem: AttentionProblem, backend: Any, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None,
    dlse: Tensor | None, needs: Needs, grads: Grads,
) -> None:  # fmt: skip
    if _wanted(problem, backend, ("backward", needs, dlse is None)):
        expected = cpu.backward(problem, inputs, out, lse, dout, dlse, needs)
        names = [f"gradient of {name}" for name in Grads._fields]
        _compare(problem, backend, names, grads, expected)


def _wanted(problem: AttentionProblem, backend: Any, what: Any) -> bool:
    if backend is cpu or (problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    key = problem, backend.__name__, what
    if key in _done:
        return False
    _done.add(key)
    return True


def _compare(
    problem: AttentionProblem, backend: Any, names: Sequence[str], found: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
) -> None:  # fmt: skip
    for name, a, b in zip(names, found, expected, strict=True):
        if a is None or b is None:
            continue
        eps = torch.finfo(problem.dtype).eps
        a, b = a.double(), b.double()
        finite = b.isfinite()
        same_place = torch.equal(a.isfinite(), finite)
        difference, size = (a - b)[finite & a.isfinite()].abs(), b[finite].abs()
        if same_place and not len(size):
            continue
        mean = difference.mean() / size.mean().clamp(min=1e-30)
        largest = difference.max() / size.max().clamp(min=1e-30) if len(difference) else mean
        if not (same_place and mean <= _MEAN * eps and largest <= _LARGEST * eps):
            raise RuntimeError(
                f"speedlight self-check: {backend.__name__.rpartition('.')[2]} and cpu differ in {name} by "
                f"{float(mean):.1e} of its size in the mean and by {float(largest):.1e} of its largest at most"
                f"{'' if same_place else ', and in where it is finite'}; please report this with {problem}"
            )
