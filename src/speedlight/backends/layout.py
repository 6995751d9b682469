"""How the Triton backends hand tensors of any strides to their kernels."""

from __future__ import annotations

from torch import Tensor

from ..problem import AttentionProblem


def unit_of(problem: AttentionProblem, tensors: tuple[Tensor | None, ...]) -> int:
    """Elements in which strides are counted: as many as fill 16 bytes if all strides are such multiples, else 1."""
    unit = 16 // problem.dtype.itemsize
    in_use = [s for t in tensors if t is not None and t.dim() >= 3 for s in t.stride()[:-1]]
    dims = [problem.head_dim, problem.head_dim_v]
    return unit if all(n % unit == 0 for n in in_use + dims) else 1


def strides(problem: AttentionProblem, unit: int, **tensors: Tensor | None) -> dict[str, int]:
    """stride_<name><axis> in units, the batch stride 0 in varlen. Rows are axis m for queries, n for keys."""
    named = {}
    for name, t in tensors.items():
        assert t is not None
        batch, row, head = (0, *t.stride()[:2]) if problem.varlen else t.stride()[:3]
        named[f"stride_{name}b"] = batch // unit
        named[f"stride_{name}{'n' if name in 'kv' else 'm'}"] = row // unit
        named[f"stride_{name}h"] = head // unit
    return named


def vectorised(problem: AttentionProblem, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether rows of all 3-D and 4-D tensors start on 16 bytes, so that tiles load 16 bytes at a time."""
    return unit_of(problem, tensors) > 1 and all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
