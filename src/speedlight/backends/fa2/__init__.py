"""The `fa2` backend: FlashAttention-2 in Triton, for every GPU that Triton compiles for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ... import launch
from ...launch import Launch
from ...problem import AttentionProblem
from ...target import Target, interpreting, target_of
from ..contract import Grads, Inputs, Needs
from ..layout import (
    Tensors,
    add_lengths,
    dlse_strides,
    new,
    outputs,
    pick,
    programs,
    scale_first,
    sizes,
    strides,
    tiles_of,
    unit_of,
    vectorised,
)
from .backward import _attn_bwd_delta_kernel, _attn_bwd_dkdv_kernel, _attn_bwd_dq_kernel
from .forward import _attn_fwd_kernel
from .term_gradients import _attn_bwd_dbias_kernel, _attn_bwd_heads_kernel
from .tiles import Tile, backward_tile, block_dim, forward_tile

_MAX_HEAD_DIM = 256
_MAX_AUX = 4
# Until the GPU tests have passed with them.
TERMS_ON_GPU = os.environ.get("SPEEDLIGHT_FA2_TERMS") == "1"
_DELTA_ROWS = 64
_HEAD_ROWS = 512
_SPLIT_BLOCK, _SPLIT_PROGRAMS = 64, 512
_UNBOUNDED = 2**31 - 1
# K and V of the heads in flight should stay in the L2 cache; a conservative share of what current GPUs have.
_L2_BYTES = 16 * 2**20
_WITH_HEAD_DIM = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def supports(problem: AttentionProblem, target: Target) -> str | None:
    if target.kind == "torch":
        return "it needs a GPU with Triton"
    if problem.dtype is torch.float64:
        return "it computes in float32, and the inputs are float64"
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        return f"head dimensions above {_MAX_HEAD_DIM} are not supported, got {dims}"
    if problem.head_dim_v == 0:
        return "there is nothing to sum: v has head dimension 0"
    if problem.dtype is torch.bfloat16 and target.kind == "cuda" and target.arch == 75:
        return "Turing has no bfloat16 arithmetic"
    if problem.dtype is torch.float32 and block_dim(max(problem.head_dim, problem.head_dim_v)) > 128:
        # The least tiles of the backward pass, four of 16 x 256 and a reduction.
        if target.kind == "cuda" and target.shared_memory < 65 * 1024:
            return f"float32 with head dimensions above 128 needs more shared memory than {target} has"
    if target.is_gpu and not TERMS_ON_GPU and (problem.has_terms or problem.sink or problem.dropout_threshold):
        return (
            "biases, masks, ALiBi, sinks and dropout have been tested in Triton's interpreter and not on a GPU yet "
            "(SPEEDLIGHT_FA2_TERMS=1 runs them all the same)"
        )
    for name, axes in (("bias", problem.bias_axes), ("mask", problem.mask_axes)):
        if len(axes) > _MAX_AUX:
            return f"{name} functions take up to {_MAX_AUX} aux tensors, got {len(axes)}"
    return None


def describe_tile(problem: AttentionProblem, target: Target) -> str:
    return f"forward {forward_tile(problem, target)}, backward {backward_tile(problem, target)}"


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    out, lse = outputs(problem, q)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    terms: tuple[Any, ...] = ()
    if not problem.plain:
        add_lengths(tensors, inputs)
        terms = _add_terms(tensors, inputs)
        if problem.sink:
            tensors["sink"] = inputs.sink.contiguous()  # type: ignore[union-attr]
    key = "fa2.forward", problem, q.stride(), k.stride(), v.stride(), terms
    launch.run(key, problem.device, tensors, lambda: forward_launch_for(problem, tensors))
    return out, lse


def forward_launch_for(problem: AttentionProblem, tensors: Tensors) -> Launch:
    """With the tile for this device and these tensors; for fa3 too, which has the same outputs."""
    read = tensors["q"], tensors["k"], tensors["v"]
    return forward_launch(problem, tensors, forward_tile(problem, target_of(problem.device), vectorised(problem, read)))


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    needs: Needs,
) -> Grads:  # fmt: skip
    q, k, v = inputs[:3]
    if dout is None:
        dout = torch.zeros_like(out)
    dq = dk = dv = d_slopes = d_bias = d_sink = None
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if needs.q:
        tensors["dq"] = dq = new(q)
    if needs.k:
        tensors["dk"] = dk = new(k)
    if needs.v:
        tensors["dv"] = dv = new(v)
    if needs.q or needs.k or needs.alibi_slopes or needs.bias or needs.sink:
        tensors["delta"] = torch.empty_like(lse)
    if dlse is not None:
        tensors["dlse"] = dlse
    terms: tuple[Any, ...] = ()
    if not problem.plain:
        add_lengths(tensors, inputs)
        terms = _add_terms(tensors, inputs)
        per_head = (problem.batch, problem.num_heads)
        if needs.alibi_slopes:
            tensors["dslopes"] = torch.empty_like(lse)
            tensors["dslope"] = d_slopes = lse.new_empty(per_head)
        if needs.sink:
            tensors["sink"] = inputs.sink.contiguous()  # type: ignore[union-attr]
            tensors["dsink"] = d_sink = lse.new_empty(per_head)
        if needs.bias:
            assert problem.bias is not None
            splits = _splits(problem, problem.bias.shape)
            tensors["dbias"] = d_bias = lse.new_empty((splits, *problem.bias.shape))
    key = (
        "fa2.backward", problem, q.stride(), k.stride(), v.stride(), dout.stride(),
        None if dlse is None else dlse.stride(), needs, terms,
    )  # fmt: skip
    launch.run(key, problem.device, tensors, lambda: backward_launches_for(problem, tensors))
    if d_slopes is not None and not problem.alibi_batched:
        d_slopes = d_slopes.sum(0)
    if d_sink is not None:
        d_sink = d_sink.sum(0).to(inputs.sink.dtype)  # type: ignore[union-attr]
    if d_bias is not None:
        d_bias = d_bias.sum(0).to(problem.bias.dtype)  # type: ignore[union-attr]
    return Grads(dq, dk, dv, d_slopes, d_bias, d_sink)


def _add_terms(tensors: Tensors, inputs: Inputs) -> tuple[Any, ...]:
    """What is added to scores or hides them, by the kernels' names; the strides by which they are read."""
    if inputs.alibi_slopes is not None:
        tensors["alibi_slopes"] = inputs.alibi_slopes.contiguous()
    if inputs.bias is not None:
        tensors["bias"] = inputs.bias
    if inputs.mask is not None:
        tensors["mask"] = inputs.mask
    if inputs.dropout_seed is not None:
        tensors["dropout_seed"] = inputs.dropout_seed
    for kind, aux in (("bias", inputs.bias_aux), ("mask", inputs.mask_aux)):
        for n, t in enumerate(aux):
            tensors[f"{kind}_aux{n}"] = t.contiguous()
    return tuple(None if t is None else t.stride() for t in (inputs.bias, inputs.mask))


def _splits(problem: AttentionProblem, shape: tuple[int, ...]) -> int:
    """In how many parts the sums for a bias's gradient are made, so that there are programs for a GPU."""
    rows, keys = (-(-n // _SPLIT_BLOCK) if n > 1 else 1 for n in shape[2:])
    own = shape[0] * shape[1] * rows * keys
    tiles = -(-problem.seqlen_q // _SPLIT_BLOCK) * -(-problem.seqlen_k // _SPLIT_BLOCK)
    return max(1, min(_SPLIT_PROGRAMS // max(own, 1), problem.batch * problem.num_heads * tiles // max(own, 1)))


def backward_launches_for(problem: AttentionProblem, tensors: Tensors) -> list[Launch]:
    """As forward_launch_for. The gradients asked for are in ``tensors``."""
    read = tensors["q"], tensors["k"], tensors["v"], tensors["dout"]
    tile = backward_tile(problem, target_of(problem.device), vectorised(problem, read))
    launches = []
    if tensors.keys() & {"dq", "dslopes"}:
        launches.append(dq_launch(problem, tensors, tile.dq))
    elif tensors.keys() & {"dk", "dsink", "dbias"}:
        launches.append(delta_launch(problem, tensors))
    if tensors.keys() & {"dk", "dv"}:
        launches.append(dkdv_launch(problem, tensors, tile.dkdv))
    if tensors.keys() & {"dslope", "dsink"}:
        launches.append(heads_launch(problem, tensors))
    if "dbias" in tensors:
        launches.append(dbias_launch(problem, tensors, tile.dq))
    return launches


# Launch records. Tensors may be on the meta device: nothing here reads a value.


def forward_launch(problem: AttentionProblem, tensors: Tensors, tile: Tile) -> Launch:
    read = pick(tensors, "q", "k", "v")
    unit = unit_of(problem, read.values())
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    args = {
        **strides(problem, unit, read),
        **sizes(problem),
        "group_size": problem.group_size,
        "heads_together": max(1, min(_L2_BYTES // max(kv_bytes, 1), problem.batch * problem.num_heads)),
        "SCALE_FIRST": problem.softcap > 0 or scale_first(problem) or problem.has_terms,
        "TAIL": _ragged(problem, problem.seqlen_k, tile.block_n),
        **_term_args(problem, tensors),
        **_tile_args(problem, tile, tensors, unit),
    }
    grid = tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads
    return _record(_attn_fwd_kernel, grid, tensors, args, tile)


def delta_launch(problem: AttentionProblem, tensors: Tensors) -> Launch:
    num_rows = problem.seqlen_q if problem.varlen else problem.batch * problem.seqlen_q
    args = {
        **strides(problem, 1, pick(tensors, "dout")),
        **dlse_strides(problem, tensors),
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "num_rows": num_rows,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": _DELTA_ROWS,
        "BLOCK_DV": block_dim(problem.head_dim_v),
    }
    grid = -(-num_rows // _DELTA_ROWS) * problem.num_heads
    return Launch(_attn_bwd_delta_kernel, (programs(grid),), tensors, args, num_warps=4, num_stages=1)


def dkdv_launch(problem: AttentionProblem, tensors: Tensors, tile: Tile) -> Launch:
    read = pick(tensors, "q", "k", "v", "dout")
    unit = unit_of(problem, read.values())
    args = {
        **strides(problem, unit, read),
        **sizes(problem),
        # A compile-time count: with one query head per K/V head the loop over the group vanishes, and its registers.
        "GROUP_SIZE": problem.group_size,
        "NEED_DK": "dk" in tensors,
        "NEED_DV": "dv" in tensors,
        "TAIL": _ragged(problem, problem.seqlen_q, tile.block_m),
        **_term_args(problem, tensors),
        **_tile_args(problem, tile, tensors, unit),
    }
    grid = tiles_of(problem, problem.seqlen_k, tile.block_n) * problem.num_heads_kv
    return _record(_attn_bwd_dkdv_kernel, grid, tensors, args, tile)


def dq_launch(problem: AttentionProblem, tensors: Tensors, tile: Tile) -> Launch:
    read = pick(tensors, "q", "k", "v", "dout")
    unit = unit_of(problem, read.values())
    args = {
        **strides(problem, unit, read),
        **dlse_strides(problem, tensors),
        **sizes(problem),
        "group_size": problem.group_size,
        "TAIL": _ragged(problem, problem.seqlen_k, tile.block_n),
        **_term_args(problem, tensors),
        **_tile_args(problem, tile, tensors, unit),
    }
    grid = tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads
    return _record(_attn_bwd_dq_kernel, grid, tensors, args, tile)


def dbias_launch(problem: AttentionProblem, tensors: Tensors, tile: Tile) -> Launch:
    read = pick(tensors, "q", "k", "v", "dout")
    unit = unit_of(problem, read.values())
    splits, *shape = tensors["dbias"].shape
    per = dict(zip(("PER_BATCH", "PER_HEAD", "PER_ROW", "PER_KEY"), (n > 1 for n in shape), strict=True))
    args = {
        **strides(problem, unit, read),
        **sizes(problem),
        "group_size": problem.group_size,
        "splits": splits,
        **_term_args(problem, tensors),
        **per,
        **_tile_args(problem, tile, tensors, unit),
    }
    rows = -(-shape[2] // tile.block_m) if per["PER_ROW"] else 1
    keys = -(-shape[3] // tile.block_n) if per["PER_KEY"] else 1
    return _record(_attn_bwd_dbias_kernel, splits * shape[0] * shape[1] * rows * keys, tensors, args, tile)


def heads_launch(problem: AttentionProblem, tensors: Tensors) -> Launch:
    args = {
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "BLOCK_M": _HEAD_ROWS,
    }
    grid = programs(problem.batch * problem.num_heads)
    return Launch(_attn_bwd_heads_kernel, (grid,), tensors, args, num_warps=4, num_stages=1)


def _term_args(problem: AttentionProblem, tensors: Tensors) -> dict[str, Any]:
    args: dict[str, Any] = {"stride_ab": problem.num_heads if problem.alibi_batched else 0}
    for name, letter in (("bias", "b"), ("mask", "m")):
        t = tensors.get(name)
        shape, stride = ((1,) * 4, (0,) * 4) if t is None else (t.shape, t.stride())
        for axis, size, step in zip("bhmn", shape, stride, strict=True):
            args[f"stride_{letter}{axis}"] = step if size > 1 else 0
        args[f"{name}_rows"], args[f"{name}_keys"] = (size if size > 1 else _UNBOUNDED for size in shape[2:])
    return args | {
        "BIAS_FN": _compiled(problem.bias_fn),
        "BIAS_AXES": _axes(problem.bias_axes),
        "MASK_FN": _compiled(problem.mask_fn),
        "MASK_AXES": _axes(problem.mask_axes),
        "NATURAL": problem.has_bias,
        "HIDES": problem.hides,
        "DROPOUT": problem.dropout_threshold > 0,
        "threshold": problem.dropout_threshold,
        "keep_scale": problem.keep_scale,
    }


def _axes(names: tuple[str, ...]) -> int:
    """Along which the aux tensors lie, as terms.py counts them: two bits each."""
    return sum(("", "head", "q", "kv").index(name) << 2 * n for n, name in enumerate(names))


@functools.cache
def _compiled(fn: Callable[..., Any] | None) -> Any:
    """A modifier function as kernels call it. The interpreter runs it as it is."""
    return fn if fn is None or interpreting() else triton.jit(fn)


def _tile_args(problem: AttentionProblem, tile: Tile, tensors: Tensors, unit: int) -> dict[str, Any]:
    # Offsets within a tile are 32-bit unless some row stride is so long that a tile spans 2^31 elements.
    longest = max(t.stride(-3) for name, t in tensors.items() if name in _WITH_HEAD_DIM)
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "HAS_LEFT": problem.window_left is not None,
        "HAS_RIGHT": problem.window_right is not None,
        "SOFTCAP": problem.softcap > 0,
        "PRECISION": problem.fp32_precision,
        "UNIT": unit,
        "WIDE": longest * max(tile.block_m, tile.block_n) >= 2**31,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
    }


def _ragged(problem: AttentionProblem, rows: int, block: int) -> bool:
    """Whether the walk over blocks of the other side can end in a partial block, which needs a loop of its own."""
    return problem.varlen or problem.seqused_q or problem.seqused_k or rows % block != 0


def _record(kernel: Any, grid: int, tensors: Tensors, args: dict[str, Any], tile: Tile) -> Launch:
    options = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return Launch(kernel, (programs(grid),), tensors, args, tile.num_warps, tile.num_stages, options)
