"""The `fa3` backend: FlashAttention-3 in Gluon, for Hopper."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ... import launch
from ...launch import Descriptor, Launch
from ...problem import AttentionProblem
from ...target import Target
from .. import fa2
from ..contract import Grads, Inputs, Needs
from ..fa2.tiles import block_dim
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
)
from .backward import _attn_bwd_kernel
from .backward_dq import _attn_bwd_dq_kernel
from .forward import _attn_fwd_kernel
from .preprocess import _attn_bwd_convert_kernel, _attn_bwd_preprocess_kernel
from .tiles import PRODUCER_REGISTERS, BwdTile, DqTile, FwdTile, backward_tile, dq_tile, forward_tile
from .versions import NAMED_BARRIERS, unverified

_L2_BYTES = 32 * 2**20  # of K and V that heads handled at once may take

# Gradients are made by fa2 until the GPU tests of fa3's own have all passed (docs/notes/hopper-backward.md).
OWN_BACKWARD = os.environ.get("SPEEDLIGHT_FA3_BACKWARD") == "1"


def supports(problem: AttentionProblem, target: Target) -> str | None:
    if target.kind != "cuda" or target.arch != 90:
        return f"it is written for Hopper (sm_90), and this is {target}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16 inputs, got {problem.dtype}"
    for name, used in (
        ("alibi_slopes", problem.alibi_batched is not None),
        ("bias", problem.has_bias),
        ("mask", problem.mask is not None or problem.mask_fn is not None),
        ("sink", problem.sink),
        ("dropout", problem.dropout_threshold > 0),
    ):
        if used:
            return f"{name} is not supported yet"
    return fa2.supports(problem, target) or unverified()


def describe_tile(problem: AttentionProblem, target: Target) -> str:
    gradients = "" if OWN_BACKWARD else ", and for gradients"
    tiles = fa2.describe_tile(problem, target)
    return f"forward {forward_tile(problem)} where TMA can address q, k and v; else{gradients}, fa2: {tiles}"


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    device = problem.device
    out, lse = outputs(problem, q)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "counter": _counter(device)}
    if not problem.plain:
        add_lengths(tensors, inputs)

    def build() -> Launch:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or not _addressable(problem, (q, k, v)):
            return fa2.forward_launch_for(problem, tensors)
        return forward_launch(problem, tensors, forward_tile(problem), _num_sms(device))

    launch.run(("fa3.forward", problem, q.stride(), k.stride(), v.stride()), device, tensors, build)
    return out, lse


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    needs: Needs,
) -> Grads:  # fmt: skip
    # Rows of dq and dk are head_dim long, wherever those of q and k start.
    if not OWN_BACKWARD or dout is None or problem.head_dim % 8:
        return fa2.backward(problem, inputs, out, lse, dout, dlse, needs)
    q, k, v = inputs[:3]
    # By a kernel of its own dQ has the same bits every time, and any number of columns.
    apart = problem.deterministic or max(problem.head_dim, problem.head_dim_v) > 128 or not (needs.k or needs.v)
    tile = backward_tile(problem, apart)
    # lse_delta is by tile of rows, then head, as is the sum that threads add to.
    blocks = tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads
    rows = blocks * tile.block_m
    lse_delta = q.new_empty(2 * rows, dtype=torch.float32)
    tensors = {
        "q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "lse_delta": lse_delta,
        "delta": lse_delta,  # for fa2's kernels
        "counter": _counter(problem.device),
    }  # fmt: skip
    dq = dk = dv = None
    if needs.q:
        tensors["dq"] = dq = new(q)
        if not apart:
            sum_shape = q.shape if tile.bulk_dq else (rows, block_dim(problem.head_dim))
            tensors["dq_sum"] = q.new_empty(*sum_shape, dtype=torch.float32)
    if needs.k:
        tensors["dk"] = dk = new(k)
    if needs.v:
        tensors["dv"] = dv = new(v)
    if dlse is not None:
        tensors["dlse"] = dlse
    if not problem.plain:
        add_lengths(tensors, inputs)

    def build() -> list[Launch]:
        read = q, k, v, dout
        if functools.reduce(or_, map(Tensor.data_ptr, read)) & 15 or not _addressable(problem, read):
            return fa2.backward_launches_for(problem, tensors)
        num_sms = _num_sms(problem.device)
        launches = [preprocess_launch(problem, tensors, tile)]
        if tile.apart:
            for other in ("dk", "dv"):
                some = {name: t for name, t in tensors.items() if name != other}
                if {"dk", "dv"} & some.keys():
                    launches.append(backward_launch(problem, some, tile, num_sms))
        elif needs.k or needs.v:
            launches.append(backward_launch(problem, tensors, tile, num_sms))
        if needs.q and apart:
            launches.append(dq_launch(problem, tensors, dq_tile(problem), tile.block_m, num_sms))
        elif needs.q:
            launches.append(convert_launch(problem, tensors, tile))
        return launches

    key = (
        "fa3.backward", problem, q.stride(), k.stride(), v.stride(), dout.stride(),
        None if dlse is None else dlse.stride(), needs.q, needs.k, needs.v,
    )  # fmt: skip
    launch.run(key, problem.device, tensors, build)
    return Grads(dq, dk, dv)


def _addressable(problem: AttentionProblem, tensors: tuple[Tensor, ...]) -> bool:
    """Whether TMA can address these tensors if they start on 16 bytes: strides of whole 16 bytes, neither 0 nor too
    long, also in out, whose rows are head_dim_v long."""
    limit = 1 << 39
    return problem.head_dim_v % 8 == 0 and all(
        size == 1 or (stride % 8 == 0 and 0 < stride < limit)
        for t in tensors
        for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)
    )


_COUNTERS: dict[tuple[int, int], Tensor] = {}
_PER_THREAD_STREAM = 2  # CUDA's handle of a stream that is another one in every thread


def _counter(device: torch.device) -> Tensor:
    """(next tile, programs that have ended), zero between launches. One for each stream, where launches follow each
    other, and one of its own for each launch that is captured in a graph, which may run anywhere."""
    assert device.index is not None
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return _counter(device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream == _PER_THREAD_STREAM or torch.cuda.is_current_stream_capturing():
        return _new_counter(device)
    counter = _COUNTERS.get((device.index, stream))
    if counter is None:
        # In a thread of its own: this one's allocations may go to a pool that is freed or replayed one day, as in the
        # warm-up of torch.compile(mode="reduce-overhead") and under torch.cuda.use_mem_pool.
        with ThreadPoolExecutor(1) as thread:
            counter = thread.submit(_new_counter, device, torch.cuda.current_stream(device)).result()
        _COUNTERS[device.index, stream] = counter
    return counter


def _new_counter(device: torch.device, stream: torch.cuda.Stream | None = None) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(2, dtype=torch.int32, device=device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward_launch(problem: AttentionProblem, tensors: Tensors, tile: FwdTile, num_sms: int) -> Launch:
    block_d, block_dv = block_dim(problem.head_dim), block_dim(problem.head_dim_v)
    parts = 2 if block_dv > 128 else 1  # of out, which go through the same shared memory: there is none for more
    blocks_q, blocks_kv = (1, 64, 1, block_d), (1, tile.block_n, 1, block_d)
    num_tiles = programs(tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads)
    causal_like = problem.window_left is not None or problem.window_right is not None
    neighbours = problem.varlen or problem.seqused_k
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    aligned = not ragged and (problem.seqlen_k - problem.seqlen_q) % tile.block_n == 0
    only_diagonal = problem.causal and aligned and tile.block_n % tile.block_m == 0
    args: dict[str, Any] = {
        **sizes(problem),
        "group_size": problem.group_size,
        "num_tiles": num_tiles,
        "heads_together": _heads_together(problem),
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "HAS_LEFT": problem.window_left is not None,
        "HAS_RIGHT": problem.window_right is not None,
        "MASK_FIRST": causal_like or neighbours or problem.seqlen_k % tile.block_n != 0,
        "MASK_ALL": causal_like and not only_diagonal,
        "DIAGONAL": only_diagonal and tile.block_m == tile.block_n,
        # A row that sees any key of the first block has to see its first columns.
        "FIRST_MAX": problem.window_left is None or problem.window_left >= tile.block_n,
        "EMPTY_ROWS": ragged or problem.window_left is not None or _sees_nothing_first(problem),
        "SOFTCAP": problem.softcap > 0,
        "SCALE_FIRST": scale_first(problem),
        "NWG": tile.num_consumers,
        "BLOCK_N": tile.block_n,
        "NST": tile.num_stages,
        "PINGPONG": tile.pingpong,
        "O_PARTS": parts,
        "NAMED": NAMED_BARRIERS,
        "QREG": tile.q_in_registers,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    descriptors = {
        "q": _descriptor(problem, tensors, "q", blocks_q),
        "k": _descriptor(problem, tensors, "k", blocks_kv),
        "v": _descriptor(problem, tensors, "v", (*blocks_kv[:3], block_dv)),
        "out_tiles": _descriptor(problem, tensors, "out", (*blocks_q[:3], block_dv // parts)),
    }
    grid = (min(num_sms, num_tiles),)
    return Launch(_attn_fwd_kernel, grid, tensors, args, num_warps=4, num_stages=1, descriptors=descriptors)


def _heads_together(problem: AttentionProblem) -> int:
    """Of how many heads tiles of rows take turns where they differ in length, so that the longest come first."""
    if problem.window_left is None and problem.window_right is None:
        return 1
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    together = max(1, min(_L2_BYTES // max(kv_bytes, 1), problem.batch * problem.num_heads))
    return 1 << (together.bit_length() - 1)


def preprocess_launch(problem: AttentionProblem, tensors: Tensors, tile: BwdTile) -> Launch:
    unit = unit_of(problem, (tensors["dout"],))
    args = {
        **strides(problem, unit, pick(tensors, "dout")),
        **dlse_strides(problem, tensors),
        "softmax_scale": problem.softmax_scale,
        "START": _starts_at_lse(problem, tile),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
        "UNIT": unit,
        "BULK": tile.bulk_dq,
    }
    return _by_rows(_attn_bwd_preprocess_kernel, problem, tensors, tile, args)


def convert_launch(problem: AttentionProblem, tensors: Tensors, tile: BwdTile) -> Launch:
    args = {
        "softmax_scale": problem.softmax_scale,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_dim(problem.head_dim),
        "BULK": tile.bulk_dq,
    }
    return _by_rows(_attn_bwd_convert_kernel, problem, tensors, tile, args)


def dq_launch(problem: AttentionProblem, tensors: Tensors, tile: DqTile, rows: int, num_sms: int) -> Launch:
    """``rows``: of the tiles by which lse and delta are kept."""
    block_d, block_dv = block_dim(problem.head_dim), block_dim(problem.head_dim_v)
    num_tiles = programs(tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads)
    has_left, has_right = problem.window_left is not None, problem.window_right is not None
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    args: dict[str, Any] = {
        **sizes(problem),
        "group_size": problem.group_size,
        "num_tiles": num_tiles,
        "heads_together": _heads_together(problem),
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "HAS_LEFT": has_left,
        "HAS_RIGHT": has_right,
        "MASKS": has_left or has_right or ragged or problem.seqlen_k % tile.block_n != 0,
        "CLEAR": has_left or ragged,
        "SOFTCAP": problem.softcap > 0,
        "BLOCK_N": tile.block_n,
        "NST": tile.num_stages,
        "NSTV": tile.num_stages_v,
        "ROWS": rows,
        "OWN_STAGING": tile.own_staging,
        "NAMED": NAMED_BARRIERS,
        "QREG": tile.operands_in_registers,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    blocks_q, blocks_kv = (1, 64, 1, block_d), (1, tile.block_n, 1, block_d)
    descriptors = {
        "q": _descriptor(problem, tensors, "q", blocks_q),
        "k": _descriptor(problem, tensors, "k", blocks_kv),
        "v": _descriptor(problem, tensors, "v", (*blocks_kv[:3], block_dv)),
        "dout": _descriptor(problem, tensors, "dout", (*blocks_q[:3], block_dv)),
        "dq_tiles": _descriptor(problem, tensors, "dq", blocks_q),
    }
    grid = (min(num_sms, num_tiles),)
    return Launch(_attn_bwd_dq_kernel, grid, tensors, args, num_warps=4, num_stages=1, descriptors=descriptors)


def _by_rows(kernel: Any, problem: AttentionProblem, tensors: Tensors, tile: BwdTile, args: dict[str, Any]) -> Launch:
    """A program for each tile of rows and head."""
    args |= {
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "BLOCK_M": tile.block_m,
    }
    grid = programs(tiles_of(problem, problem.seqlen_q, tile.block_m) * problem.num_heads)
    return Launch(kernel, (grid,), tensors, args, num_warps=4, num_stages=1)


def backward_launch(problem: AttentionProblem, tensors: Tensors, tile: BwdTile, num_sms: int) -> Launch:
    block_d, block_dv = block_dim(problem.head_dim), block_dim(problem.head_dim_v)
    num_tiles = programs(tiles_of(problem, problem.seqlen_k, tile.block_n) * problem.num_heads_kv)
    ragged = problem.varlen or problem.seqused_q or problem.seqused_k
    right = problem.window_right
    has_left, has_right = problem.window_left is not None, right is not None
    even = problem.seqlen_q % tile.block_m == 0 and problem.seqlen_k % tile.block_n == 0
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + problem.head_dim * 4
    together = max(_L2_BYTES // max(problem.seqlen_q * row_bytes * problem.group_size, 1), 8)
    together = min(together, problem.batch * problem.num_heads_kv)
    args: dict[str, Any] = {
        **sizes(problem),
        "group_size": problem.group_size,
        "num_tiles": num_tiles,
        "heads_together": 1 << (together.bit_length() - 1) if has_left or has_right else 1,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "HAS_LEFT": has_left,
        "HAS_RIGHT": has_right,
        "MASKS": has_left or has_right or ragged or not even,
        "CLEAR": has_left or ragged or (right is not None and problem.seqlen_q + right != problem.seqlen_k),
        "SOFTCAP": problem.softcap > 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NST": tile.num_stages,
        "NAMED": NAMED_BARRIERS,
        "START": _starts_at_lse(problem, tile),
        # Beside K and V there is room for one dO: it is needed for dP alone, and Q for dK as well.
        "NSTO": 1 if tile.apart and "dk" in tensors else tile.num_stages,
        "BULK": tile.bulk_dq,
        "APART": tile.apart,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    blocks_q, blocks_kv = (1, tile.block_m, 1, block_d), (1, 64 if tile.apart else tile.block_n, 1, block_d)
    descriptors = {
        "q": _descriptor(problem, tensors, "q", blocks_q),
        "k": _descriptor(problem, tensors, "k", blocks_kv),
        "v": _descriptor(problem, tensors, "v", (*blocks_kv[:3], block_dv)),
        "dout": _descriptor(problem, tensors, "dout", (*blocks_q[:3], block_dv)),
        "lse_delta": Descriptor("lse_delta", tuple(tensors["lse_delta"].shape), (1,), (tile.block_m,)),
    }
    for name, dim in (("dk", block_d), ("dv", block_dv)):
        if name in tensors:
            descriptors[f"{name}_tiles"] = _descriptor(problem, tensors, name, (1, 64, 1, dim))
    if tile.bulk_dq and "dq_sum" in tensors:
        descriptors["dq_sum"] = _descriptor(problem, tensors, "dq_sum", (1, 64, 1, block_d // 2))
    grid = (min(num_sms, num_tiles),)
    return Launch(_attn_bwd_kernel, grid, tensors, args, num_warps=4, num_stages=1, descriptors=descriptors)


def _starts_at_lse(problem: AttentionProblem, tile: BwdTile) -> bool:
    """S is divided by the scale there, which softcap comes before, and which has to leave something to divide by."""
    return tile.start_at_lse and not problem.softcap and 1e-6 < abs(problem.softmax_scale) < 1e6


def _sees_nothing_first(problem: AttentionProblem) -> bool:
    """Whether the first row sees no key: with a right edge alone, others see more."""
    right = problem.window_right
    return right is not None and problem.seqlen_k - problem.seqlen_q + right < 0


def _descriptor(problem: AttentionProblem, tensors: Tensors, name: str, block: tuple[int, ...]) -> Descriptor:
    """As (B, S, heads, dim); packed tensors are one batch entry."""
    t = tensors[name]
    shape, strides = tuple(t.shape), t.stride()
    if problem.varlen:
        shape, strides = (1, *shape), (0, *strides)
    # The stride of an axis of size 1 means nothing to torch, but has to be a multiple of 16 bytes.
    strides = tuple(8 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True))
    return Descriptor(name, shape, (*strides, 1), block)
