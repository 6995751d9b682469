"""How the Triton backends hand tensors of any strides to their kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..problem import AttentionProblem
from .contract import Inputs

Tensors = dict[str, Tensor]  # by the kernels' parameter names
GRID_LIMIT = 2**31 - 1


def pick(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensors[name] for name in names}


def new(like: Tensor) -> Tensor:
    """Uninitialised and contiguous; in half the host time of new_empty with a tuple."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def outputs(problem: AttentionProblem, q: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, to be written. Their sizes are not given as tuples, which would take twice the host time."""
    return q.new_empty(*problem.out_shape), q.new_empty(*problem.lse_shape, dtype=torch.float32)


def add_lengths(tensors: Tensors, inputs: Inputs) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        t = getattr(inputs, name)
        if t is not None:
            tensors[name] = t


def unit_of(problem: AttentionProblem, tensors: Iterable[Tensor]) -> int:
    """Elements in which strides are counted: as many as fill 16 bytes if all strides are such multiples, else 1."""
    unit = 16 // problem.dtype.itemsize
    in_use = [s for t in tensors for s in t.stride()[:-1]]
    dims = [problem.head_dim, problem.head_dim_v]
    return unit if all(n % unit == 0 for n in in_use + dims) else 1


def strides(problem: AttentionProblem, unit: int, tensors: Tensors) -> dict[str, int]:
    """stride_<name><axis> in units, the batch stride 0 in varlen. Rows are axis m for queries, n for keys."""
    named = {}
    for name, t in tensors.items():
        batch, row, head = (0, *t.stride()[:2]) if problem.varlen else t.stride()[:3]
        name = "do" if name == "dout" else name
        named[f"stride_{name}b"] = batch // unit
        named[f"stride_{name}{'n' if name in 'kv' else 'm'}"] = row // unit
        named[f"stride_{name}h"] = head // unit
    return named


def dlse_strides(problem: AttentionProblem, tensors: Tensors) -> dict[str, int]:
    """stride_dl<axis> in elements: dlse is (B, H, Sq), varlen (H, T), and may be missing."""
    dlse = tensors.get("dlse")
    batch, head, row = (0, 0, 0) if dlse is None else ((0, *dlse.stride()) if problem.varlen else dlse.stride())
    return {"stride_dlb": batch, "stride_dlh": head, "stride_dlm": row}


def sizes(problem: AttentionProblem) -> dict[str, Any]:
    return {
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window_left": problem.window_left or 0,
        "window_right": problem.window_right or 0,
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
    }


def tiles_of(problem: AttentionProblem, rows: int, block: int) -> int:
    """Programs per head: exact when dense, the bound of common.locate_tile when varlen."""
    return rows // block + problem.batch + 1 if problem.varlen else -(-rows // block) * problem.batch


def scale_first(problem: AttentionProblem) -> bool:
    """Whether q.k is scaled before its maximum is taken, not after: always if the factor turns its order round, or may
    be 0 in fp32, for then a hidden -inf becomes NaN."""
    return problem.softmax_scale < 1e-30


def programs(count: int) -> int:
    if count > GRID_LIMIT:
        raise ValueError(f"this problem needs {count} programs, more than the {GRID_LIMIT} that a GPU grid holds")
    return count


def vectorised(problem: AttentionProblem, tensors: tuple[Tensor, ...]) -> bool:
    """Whether all rows start on 16 bytes, so that tiles load 16 bytes at a time."""
    return unit_of(problem, tensors) > 1 and all(t.data_ptr() % 16 == 0 for t in tensors)
