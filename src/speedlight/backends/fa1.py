"""The `fa1` backend: FlashAttention-1 in Triton, as the paper of 2022 states it. For study and comparison.

One program per (batch, head) runs the whole algorithm. O, l and m live in global memory; for each key block j (outer
loop) and each block of rows i that sees it (inner loop) they are loaded, updated and stored back, O normalised:

    S = scale * Q_i K_j^T       m~ = rowmax S       P = exp(S - m~)        l~ = rowsum P
    m' = max(m, m~)             l' = exp(m - m') l + exp(m~ - m') l~
    O_i = (exp(m - m') l O_i + exp(m~ - m') P V_j) / l'                    l = l', m = m'

The backward pass runs the same loops. dK_j and dV_j stay on chip, dQ_i is loaded, added to and stored back:

    P = exp(S - lse)            dV_j += P^T dO_i                           D_i = rowsum(dO_i * O_i) - dL/dlse_i
    dP = dO_i V_j^T             dS = P * (dP - D_i)                        dQ_i += scale * dS K_j
                                dK_j += scale * dS^T Q_i

Each value has one writer and one order of additions, so runs repeat bitwise. What differs from the paper:
- lse = m + log l stands for (l, m) between the passes, and D carries the gradient through it: contract.py.
- O and dQ are fp32 while they are updated, as in the authors' own code. Rounded to 16 bits once per key block, O has
  after 64 blocks 2.0 (fp16) to 3.5 times (bf16) the error of a plain computation, and more after more; in fp32 it has
  0.3 to 0.6 times (random inputs, D = 64).
- Where query heads share a K/V head, one program of the backward pass takes the whole group: dK_j and dV_j are sums
  over it.

Shapes: q, dq (B, Sq, H, D), k, dk (B, Sk, Hk, D), v, dv (B, Sk, Hk, Dv), out, dout (B, Sq, H, Dv), lse, dlse
(B, H, Sq); while updated o (B, H, Sq, Dv), dq (B, H, Sq, D), row_l, row_m (B, H, Sq), all fp32, row_m in log2 units.
Source: Dao et al., "FlashAttention" (2022), algorithm 1 and, in appendix B, algorithm 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..launch import Launch
from ..problem import AttentionProblem
from ..target import Target, target_of
from .contract import Grads, Inputs, Needs
from .fa2.common import LOG2_E, UNLIMITED, load_tile, query_range, seeing_rows, store_tile, visible
from .fa2.tiles import Tile, block_dim, family
from .layout import GRID_LIMIT, Tensors, dlse_strides, pick, strides, unit_of, vectorised

_MAX_HEAD_DIM = 128
_SIZES = ["num_heads", "seqlen_q", "seqlen_k"]  # one compilation serves them all


@triton.jit(do_not_specialize=_SIZES)
def _attn_fwd_kernel(
    q, k, v, o, row_l, row_m,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    num_heads, seqlen_q, seqlen_k, softmax_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    b = tl.cast(tl.program_id(0) // num_heads, tl.int64)
    h = tl.cast(tl.program_id(0) % num_heads, tl.int64)
    q += (b * stride_qb + h * stride_qh) * UNIT
    k += (b * stride_kb + h // GROUP_SIZE * stride_kh) * UNIT
    v += (b * stride_vb + h // GROUP_SIZE * stride_vh) * UNIT
    first_row = (b * num_heads + h) * seqlen_q
    o += first_row * HEAD_DIM_V
    row_l += first_row
    row_m += first_row
    right = 0 if CAUSAL else UNLIMITED

    for n in range(0, seqlen_k, BLOCK_N):
        k_j = load_tile(k, n, stride_kn, 0, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, UNIT, WIDE, True)
        v_j = load_tile(v, n, stride_vn, 0, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, UNIT, WIDE, True)
        offs_n = n + tl.arange(0, BLOCK_N)
        lo, hi = query_range(n, n + BLOCK_N, seqlen_q, seqlen_k, UNLIMITED, right)
        for start in range(lo // BLOCK_M * BLOCK_M, hi, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            inside = offs_m < seqlen_q
            q_i = load_tile(q, start, stride_qm, 0, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, UNIT, WIDE, True)
            l_i = tl.load(row_l + offs_m, mask=inside, other=0.0)
            m_i = tl.load(row_m + offs_m, mask=inside, other=0.0)

            s = tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION) * (softmax_scale * LOG2_E)
            if MASKED:
                ok = visible(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, 0, 0, False, CAUSAL)
                s = tl.where(ok, s, float("-inf"))
            m_block = tl.max(s, 1)
            # A row that sees no key of this block, or none so far: exp2(-inf - 0) = 0, not NaN.
            p = tl.exp2(s - tl.where(m_block == float("-inf"), 0.0, m_block)[:, None])
            m_new = tl.maximum(m_i, m_block)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            l_old = tl.exp2(m_i - m_safe) * l_i
            beta = tl.exp2(m_block - m_safe)
            l_new = l_old + beta * tl.sum(p, 1)
            l_safe = tl.where(l_new == 0, 1.0, l_new)
            # O is loaded no earlier than needed: it takes as many registers as S.
            o_i = load_tile(o, start, HEAD_DIM_V, 0, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, 1, WIDE, True)
            pv = tl.dot(p.to(v_j.dtype), v_j, input_precision=PRECISION)
            o_i = o_i * (l_old / l_safe)[:, None] + pv * (beta / l_safe)[:, None]

            # Several threads load one value of l and m; all must have it before one of them overwrites it.
            tl.debug_barrier()
            store_tile(o, start, HEAD_DIM_V, seqlen_q, o_i, HEAD_DIM_V, BLOCK_M, BLOCK_DV, WIDE)
            tl.store(row_l + offs_m, l_new, mask=inside)
            tl.store(row_m + offs_m, m_new, mask=inside)
        # The next key block loads what other threads have stored for this one.
        tl.debug_barrier()


@triton.jit(do_not_specialize=_SIZES)
def _attn_bwd_kernel(
    q, k, v, out, dout, lse, dlse, dq, dk, dv,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_dob, stride_dom, stride_doh, stride_dlb, stride_dlh, stride_dlm,
    num_heads, seqlen_q, seqlen_k, softmax_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    num_heads_kv = num_heads // GROUP_SIZE
    b = tl.cast(tl.program_id(0) // num_heads_kv, tl.int64)
    hk = tl.cast(tl.program_id(0) % num_heads_kv, tl.int64)
    k += (b * stride_kb + hk * stride_kh) * UNIT
    v += (b * stride_vb + hk * stride_vh) * UNIT
    first_key = b * seqlen_k * num_heads_kv + hk
    stride_om = num_heads * HEAD_DIM_V
    right = 0 if CAUSAL else UNLIMITED
    # Rows that see nothing load as zeros: a NaN there would survive the product with a weight of 0.
    seeing, _ = seeing_rows(seqlen_q, seqlen_k, UNLIMITED, right)

    for n in range(0, seqlen_k, BLOCK_N):
        k_j = load_tile(k, n, stride_kn, 0, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, UNIT, WIDE, True)
        v_j = load_tile(v, n, stride_vn, 0, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, UNIT, WIDE, True)
        dk_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_j = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        offs_n = n + tl.arange(0, BLOCK_N)
        lo, hi = query_range(n, n + BLOCK_N, seqlen_q, seqlen_k, UNLIMITED, right)
        for member in range(GROUP_SIZE):
            h = hk * GROUP_SIZE + member
            q_h = q + (b * stride_qb + h * stride_qh) * UNIT
            do_h = dout + (b * stride_dob + h * stride_doh) * UNIT
            o_h = out + (b * seqlen_q * num_heads + h) * HEAD_DIM_V
            first_row = (b * num_heads + h) * seqlen_q
            for start in range(lo // BLOCK_M * BLOCK_M, hi, BLOCK_M):
                offs_m = start + tl.arange(0, BLOCK_M)
                inside = (offs_m >= seeing) & (offs_m < seqlen_q)
                q_i = load_tile(q_h, start, stride_qm, seeing, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, UNIT, WIDE, True)
                do_i = load_tile(
                    do_h, start, stride_dom, seeing, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, UNIT, WIDE, True
                )
                lse_i = tl.load(lse + first_row + offs_m, mask=inside, other=0.0) * LOG2_E
                if dq is not None or dk is not None:
                    o_i = load_tile(
                        o_h, start, stride_om, seeing, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, 1, WIDE, True
                    )
                    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)
                    if dlse is not None:
                        place = b * stride_dlb + h * stride_dlh + offs_m.to(tl.int64) * stride_dlm
                        delta_i -= tl.load(dlse + place, mask=inside, other=0.0)

                # Transposed, keys along the first axis: P^T and dS^T are left operands straight from registers.
                s_t = tl.dot(k_j, tl.trans(q_i), input_precision=PRECISION) * (softmax_scale * LOG2_E)
                p_t = tl.exp2(s_t - lse_i[None, :])
                if MASKED:
                    ok = visible(offs_m[None, :], offs_n[:, None], seqlen_q, seqlen_k, 0, 0, False, CAUSAL)
                    p_t = tl.where(ok, p_t, 0.0)
                if dv is not None:
                    dv_j = tl.dot(p_t.to(do_i.dtype), do_i, dv_j, input_precision=PRECISION)
                if dq is not None or dk is not None:
                    dp_t = tl.dot(v_j, tl.trans(do_i), input_precision=PRECISION)
                    ds_t = (p_t * (dp_t - delta_i[None, :])).to(q_i.dtype)
                if dk is not None:
                    dk_j = tl.dot(ds_t, q_i, dk_j, input_precision=PRECISION)
                if dq is not None:
                    dq_h = dq + first_row * HEAD_DIM
                    dq_i = load_tile(dq_h, start, HEAD_DIM, 0, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, 1, WIDE, True)
                    dq_i += tl.dot(tl.trans(ds_t), k_j, input_precision=PRECISION) * softmax_scale
                    tl.debug_barrier()  # both barriers as in the forward
                    store_tile(dq_h, start, HEAD_DIM, seqlen_q, dq_i, HEAD_DIM, BLOCK_M, BLOCK_D, WIDE)
        if dk is not None:
            dk_j = dk_j * softmax_scale
            stride = num_heads_kv * HEAD_DIM
            store_tile(dk + first_key * HEAD_DIM, n, stride, seqlen_k, dk_j, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
        if dv is not None:
            stride = num_heads_kv * HEAD_DIM_V
            store_tile(dv + first_key * HEAD_DIM_V, n, stride, seqlen_k, dv_j, HEAD_DIM_V, BLOCK_N, BLOCK_DV, WIDE)
        tl.debug_barrier()


# (largest head dimension, forward, backward) by architecture family. Key blocks are as large as fits, for O and dQ pass
# through memory once per key block. One stage, for the compiler pipelines no loop that has a barrier in it. Chosen by
# compile checks, not tuned.
_TILES: dict[str, tuple[tuple[int, Tile, Tile], ...]] = {
    "sm90": ((64, Tile(128, 128, 8, 1), Tile(64, 128, 8, 1)), (128, Tile(128, 128, 8, 1), Tile(64, 128, 8, 1))),
    "sm100": ((64, Tile(128, 128, 8, 1), Tile(64, 128, 8, 1)), (128, Tile(128, 64, 8, 1), Tile(64, 64, 8, 1))),
    "sm80": ((64, Tile(64, 128, 4, 1), Tile(32, 128, 8, 1)), (128, Tile(64, 64, 4, 1), Tile(32, 64, 8, 1))),
    "sm86": ((64, Tile(64, 128, 4, 1), Tile(32, 128, 8, 1)), (128, Tile(64, 64, 4, 1), Tile(32, 64, 8, 1))),
    "sm75": ((64, Tile(32, 32, 4, 1), Tile(16, 32, 8, 1)), (128, Tile(32, 16, 4, 1), Tile(16, 16, 8, 1))),
    "hip": ((64, Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)), (128, Tile(64, 32, 4, 1), Tile(32, 32, 4, 1))),
    "interpreter": ((128, Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),),
}
# For rows that do not start on 16 bytes; why they need small tiles is told at fa2.tiles.FORWARD_SMALL.
_SMALL = ((64, Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)), (128, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)))


def tiles(problem: AttentionProblem, target: Target, vectorised: bool = True) -> tuple[Tile, Tile]:
    """The tiles of the forward and the backward pass. ``vectorised``: all rows start on 16 bytes."""
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    rows = _TILES[family(target)] if vectorised or not target.is_gpu else _SMALL
    return next((forward, backward) for largest, forward, backward in rows if dim <= largest)


def supports(problem: AttentionProblem, target: Target) -> str | None:
    if target.kind == "torch":
        return "it needs a GPU with Triton"
    if problem.dtype.itemsize != 2 and not (problem.dtype is torch.float32 and target.kind == "interpreter"):
        return f"it takes float16 and bfloat16 inputs, got {problem.dtype}"
    if problem.dtype is torch.bfloat16 and target.kind == "cuda" and target.arch == 75:
        return "Turing has no bfloat16 arithmetic"
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        return f"head dimensions above {_MAX_HEAD_DIM} are not supported, got {dims}"
    if problem.batch * problem.num_heads > GRID_LIMIT:
        return f"batch times heads exceeds {GRID_LIMIT}, the largest GPU grid"
    for name, used in (
        ("varlen", problem.varlen),
        ("seqused_q", problem.seqused_q),
        ("seqused_k", problem.seqused_k),
        ("window", problem.window_left is not None or problem.window_right not in (None, 0)),
        ("softcap", problem.softcap > 0),
        ("alibi_slopes", problem.alibi_batched is not None),
        ("bias", problem.bias is not None or problem.bias_fn is not None),
        ("mask", problem.mask is not None or problem.mask_fn is not None),
        ("sink", problem.sink),
        ("dropout", problem.dropout_threshold > 0),
    ):
        if used:
            return f"{name} is not supported: fa1 is for study, and does dense and causal attention only"
    return None


def describe_tile(problem: AttentionProblem, target: Target) -> str:
    fwd, bwd = tiles(problem, target)
    return f"forward {fwd}, backward {bwd}"


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    device, shape = problem.device, problem.lse_shape
    o = q.new_zeros((*shape, problem.head_dim_v), dtype=torch.float32)
    row_l = q.new_zeros(shape, dtype=torch.float32)
    row_m = q.new_full(shape, float("-inf"), dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "o": o, "row_l": row_l, "row_m": row_m}

    def build() -> Launch:
        tile, _ = tiles(problem, target_of(device), vectorised(problem, (q, k, v)))
        return forward_launch(problem, tensors, tile)

    launch.run(("fa1.forward", problem, q.stride(), k.stride(), v.stride()), device, tensors, build)
    return _rows_first(o, q.dtype), row_m * math.log(2) + row_l.log()


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    needs: Needs,
) -> Grads:  # fmt: skip
    q, k, v = inputs[:3]
    device = problem.device
    dout = torch.zeros_like(out) if dout is None else dout
    dq = q.new_zeros((*problem.lse_shape, problem.head_dim), dtype=torch.float32) if needs.q else None
    dk = k.new_empty(k.shape) if needs.k else None
    dv = v.new_empty(v.shape) if needs.v else None
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv}
    tensors = {name: t for name, t in given.items() if t is not None}

    def build() -> Launch:
        _, tile = tiles(problem, target_of(device), vectorised(problem, (q, k, v, dout)))
        return backward_launch(problem, tensors, tile)

    layout = tuple(None if t is None else t.stride() for t in (q, k, v, dout, dlse))
    launch.run(("fa1.backward", problem, needs[:3], layout), device, tensors, build)
    return Grads(None if dq is None else _rows_first(dq, q.dtype), dk, dv)


def _rows_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, S, D) to (B, S, H, D), contiguous."""
    batch, heads, rows, dim = x.shape
    return x.new_empty((batch, rows, heads, dim), dtype=dtype).copy_(x.transpose(1, 2))


# Launch records. Tensors may be on the meta device: nothing here reads a value.


def forward_launch(problem: AttentionProblem, tensors: Tensors, tile: Tile) -> Launch:
    return _record(_attn_fwd_kernel, problem.num_heads, problem, tensors, tile, pick(tensors, "q", "k", "v"), {})


def backward_launch(problem: AttentionProblem, tensors: Tensors, tile: Tile) -> Launch:
    strided = pick(tensors, "q", "k", "v", "dout")
    more = dlse_strides(problem, tensors)
    return _record(_attn_bwd_kernel, problem.num_heads_kv, problem, tensors, tile, strided, more)


def _record(
    kernel: Any, heads: int, problem: AttentionProblem, tensors: Tensors, tile: Tile, strided: Tensors,
    more: dict[str, int],
) -> Launch:  # fmt: skip
    unit = unit_of(problem, strided.values())
    # Offsets within a tile are 32-bit unless some row stride is so long that a tile spans 2^31 elements.
    longest = max(problem.num_heads * _MAX_HEAD_DIM, *(t.stride(1) for t in strided.values()))
    args = {
        **strides(problem, unit, strided),
        **more,
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "softmax_scale": problem.softmax_scale,
        "GROUP_SIZE": problem.group_size,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "CAUSAL": problem.causal,
        "MASKED": problem.causal or problem.seqlen_k % tile.block_n != 0,
        "PRECISION": problem.fp32_precision,
        "UNIT": unit,
        "WIDE": longest * max(tile.block_m, tile.block_n) >= 2**31,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
    }
    return Launch(kernel, (problem.batch * heads,), tensors, args, tile.num_warps, tile.num_stages)
