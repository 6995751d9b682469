"""The `fa2` backend: FlashAttention-2 in Triton, for every GPU that Triton compiles for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import launch
from ...launch import Launch
from ...problem import AttentionProblem
from ...target import Target, target_of
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
from .tiles import Tile, backward_tile, block_dim, forward_tile

_MAX_HEAD_DIM = 256
_DELTA_ROWS = 64
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
    for name, used in (
        ("alibi_slopes", problem.alibi_batched is not None),
        ("bias", problem.bias is not None or problem.bias_fn is not None),
        ("mask", problem.mask is not None or problem.mask_fn is not None),
        ("sink", problem.sink),
        ("dropout", problem.dropout_threshold > 0),
    ):
        if used:
            return f"{name} is not supported yet"
    return None


def describe_tile(problem: AttentionProblem, target: Target) -> str:
    return f"forward {forward_tile(problem, target)}, backward {backward_tile(problem, target)}"


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    out, lse = outputs(problem, q)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if not problem.plain:
        add_lengths(tensors, inputs)
    key = "fa2.forward", problem, q.stride(), k.stride(), v.stride()
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
    dq = dk = dv = None
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if needs.q:
        tensors["dq"] = dq = new(q)
    if needs.k:
        tensors["dk"] = dk = new(k)
    if needs.v:
        tensors["dv"] = dv = new(v)
    if needs.q or needs.k:
        tensors["delta"] = torch.empty_like(lse)
    if dlse is not None:
        tensors["dlse"] = dlse
    if not problem.plain:
        add_lengths(tensors, inputs)
    key = (
        "fa2.backward", problem, q.stride(), k.stride(), v.stride(), dout.stride(),
        None if dlse is None else dlse.stride(), needs.q, needs.k, needs.v,
    )  # fmt: skip
    launch.run(key, problem.device, tensors, lambda: backward_launches_for(problem, tensors))
    return Grads(dq, dk, dv)


def backward_launches_for(problem: AttentionProblem, tensors: Tensors) -> list[Launch]:
    """As forward_launch_for. The gradients asked for are in ``tensors``."""
    read = tensors["q"], tensors["k"], tensors["v"], tensors["dout"]
    tile = backward_tile(problem, target_of(problem.device), vectorised(problem, read))
    launches = []
    if "dq" in tensors:
        launches.append(dq_launch(problem, tensors, tile.dq))
    elif "dk" in tensors:
        launches.append(delta_launch(problem, tensors))
    if "dk" in tensors or "dv" in tensors:
        launches.append(dkdv_launch(problem, tensors, tile.dkdv))
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
        "SCALE_FIRST": problem.softcap > 0 or scale_first(problem),
        "TAIL": _ragged(problem, problem.seqlen_k, tile.block_n),
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
        **_tile_args(problem, tile, tensors, unit),
    }
    grid = tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads
    return _record(_attn_bwd_dq_kernel, grid, tensors, args, tile)


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
