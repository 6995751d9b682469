"""The `fa1` backend: FlashAttention-1 in Triton, as the paper of 2022 states it. For study and comparison.

One program per (batch, head) runs the whole algorithm. O, l and m live in global memory; for each key block j (outer
loop), for each query block i that sees it (inner loop), they are loaded, updated and stored back, O normalised each time:

    S = tau Q_i K_j^T           m~ = rowmax S       P~ = exp(S - m~)       l~ = rowsum P~
    m' = max(m, m~)             l' = exp(m - m') l + exp(m~ - m') l~
    O_i = (l exp(m - m') O_i + exp(m~ - m') P~ V_j) / l'

Backward, in the same order of loops, dK_j and dV_j stay on chip and dQ_i is read, added to and written:

    P = exp(S - lse)            dV_j += P^T dO_i
    dP = dO_i V_j^T             D_i = rowsum(dO_i * O_i) - dL/dlse_i        dS = P * (dP - D_i)
    dQ_i += tau dS K_j          dK_j += tau dS^T Q_i

Every value has one writer and a fixed order of additions, so runs repeat bitwise. Against the paper: lse = m + log l
stands for the pair (l, m) between the passes, as the contract has it; D_i carries the gradient through lse; O and dQ
are kept in fp32 until the end, as in the authors' own code: rounding O to 16 bits once per key block breaks the error
bound of the contract.

Shapes: q, dq (B, Sq, H, D), k, dk (B, Sk, H, D), v, dv (B, Sk, H, Dv), out, o, dout (B, Sq, H, Dv), lse, l, m, dlse
(B, H, Sq). m is in log2 units in the kernel. Source: Dao et al., "FlashAttention" (2022), algorithm 1 and, in appendix B,
algorithm 4; for which blocks causal attention skips, ranges.py.
"""

from __future__ import annotations

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

_MAX_HEAD_DIM = 128
LN_2 = 0.6931471805599453

SIZES = ["num_heads", "seqlen_q", "seqlen_k"]


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd_kernel(
    q, k, v, o, l, m,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    num_heads, seqlen_q, seqlen_k, softmax_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    b = tl.cast(tl.program_id(0) // num_heads, tl.int64)
    h = tl.cast(tl.program_id(0) % num_heads, tl.int64)
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + h // GROUP_SIZE * stride_kh
    v += b * stride_vb + h // GROUP_SIZE * stride_vh
    o += (b * seqlen_q * num_heads + h) * HEAD_DIM_V
    l += (b * num_heads + h) * seqlen_q
    m += (b * num_heads + h) * seqlen_q
    stride_om = num_heads * HEAD_DIM_V
    right = 0 if CAUSAL else UNLIMITED

    for n in range(0, seqlen_k, BLOCK_N):
        k_j = load_tile(k, n, stride_kn, 0, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE, True)
        v_j = load_tile(v, n, stride_vn, 0, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, WIDE, True)
        offs_n = n + tl.arange(0, BLOCK_N)
        lo, hi = query_range(n, n + BLOCK_N, seqlen_q, seqlen_k, UNLIMITED, right)
        for start in range(lo // BLOCK_M * BLOCK_M, hi, BLOCK_M):
            offs_m = start + tl.arange(0, BLOCK_M)
            q_i = load_tile(q, start, stride_qm, 0, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, WIDE, True)
            l_i = tl.load(l + offs_m, mask=offs_m < seqlen_q, other=0.0)
            m_i = tl.load(m + offs_m, mask=offs_m < seqlen_q, other=0.0)

            s = tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION) * (softmax_scale * LOG2_E)
            if MASKED:
                ok = visible(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, 0, 0, False, CAUSAL)
                s = tl.where(ok, s, float("-inf"))
            m_block = tl.max(s, 1)
            m_new = tl.maximum(m_i, m_block)
            # Rows that see no key of this block, or none so far: exp2(-inf - 0) = 0, not NaN.
            p = tl.exp2(s - tl.where(m_block == float("-inf"), 0.0, m_block)[:, None])
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - m_safe) * l_i
            beta = tl.exp2(m_block - m_safe)
            l_new = alpha + beta * tl.sum(p, 1)
            l_safe = tl.where(l_new == 0, 1.0, l_new)
            o_i = load_tile(o, start, stride_om, 0, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, WIDE, True)
            pv = tl.dot(p.to(v_j.dtype), v_j, input_precision=PRECISION)
            o_i = o_i * (alpha / l_safe)[:, None] + pv * (beta / l_safe)[:, None]

            # A value of l and m is loaded by several threads; all must have it before one overwrites it.
            tl.debug_barrier()
            store_tile(o, start, stride_om, seqlen_q, o_i, HEAD_DIM_V, BLOCK_M, BLOCK_DV, WIDE)
            tl.store(l + offs_m, l_new, mask=offs_m < seqlen_q)
            tl.store(m + offs_m, m_new, mask=offs_m < seqlen_q)
        # The next key block loads what other threads have stored for this one.
        tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def _attn_bwd_kernel(
    q, k, v, out, dout, lse, dlse, dq, dk, dv,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_dob, stride_dom, stride_doh, stride_dlb, stride_dlh, stride_dlm,
    num_heads, seqlen_q, seqlen_k, softmax_scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    num_heads_kv = num_heads // GROUP_SIZE
    b = tl.cast(tl.program_id(0) // num_heads_kv, tl.int64)
    hk = tl.cast(tl.program_id(0) % num_heads_kv, tl.int64)
    k += b * stride_kb + hk * stride_kh
    v += b * stride_vb + hk * stride_vh
    stride_om = num_heads * HEAD_DIM_V
    stride_dqm = num_heads * HEAD_DIM
    right = 0 if CAUSAL else UNLIMITED
    # Rows that see nothing load as zeros: a NaN there would survive the product with a weight of 0.
    first, _ = seeing_rows(seqlen_q, seqlen_k, UNLIMITED, right)

    for n in range(0, seqlen_k, BLOCK_N):
        k_j = load_tile(k, n, stride_kn, 0, seqlen_k, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE, True)
        v_j = load_tile(v, n, stride_vn, 0, seqlen_k, HEAD_DIM_V, BLOCK_N, BLOCK_DV, WIDE, True)
        dk_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_j = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        offs_n = n + tl.arange(0, BLOCK_N)
        lo, hi = query_range(n, n + BLOCK_N, seqlen_q, seqlen_k, UNLIMITED, right)
        for member in range(0, GROUP_SIZE):
            h = hk * GROUP_SIZE + member
            q_h = q + b * stride_qb + h * stride_qh
            out_h = out + (b * seqlen_q * num_heads + h) * HEAD_DIM_V
            dout_h = dout + b * stride_dob + h * stride_doh
            row_h = (b * num_heads + h) * seqlen_q
            for start in range(lo // BLOCK_M * BLOCK_M, hi, BLOCK_M):
                offs_m = start + tl.arange(0, BLOCK_M)
                inside = (offs_m >= first) & (offs_m < seqlen_q)
                q_i = load_tile(q_h, start, stride_qm, first, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, WIDE, True)
                do_i = load_tile(dout_h, start, stride_dom, first, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, WIDE, True)
                lse_i = tl.load(lse + row_h + offs_m, mask=inside, other=0.0)

                if dq is not None or dk is not None:
                    o_i = load_tile(out_h, start, stride_om, first, seqlen_q, HEAD_DIM_V, BLOCK_M, BLOCK_DV, WIDE, True)
                    delta_i = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), 1)
                    if dlse is not None:
                        place = b * stride_dlb + h * stride_dlh + offs_m.to(tl.int64) * stride_dlm
                        delta_i -= tl.load(dlse + place, mask=inside, other=0.0)

                # Transposed, keys along the first axis: P^T and dS^T are then left operands straight from registers.
                s_t = tl.dot(k_j, tl.trans(q_i), input_precision=PRECISION) * (softmax_scale * LOG2_E)
                p_t = tl.exp2(s_t - (lse_i * LOG2_E)[None, :])
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
                        dq_h = dq + (b * seqlen_q * num_heads + h) * HEAD_DIM
                        dq_i = load_tile(dq_h, start, stride_dqm, 0, seqlen_q, HEAD_DIM, BLOCK_M, BLOCK_D, WIDE, True)
                        dq_i += tl.dot(tl.trans(ds_t), k_j, input_precision=PRECISION) * softmax_scale
                        tl.debug_barrier()  # as in the forward
                        store_tile(dq_h, start, stride_dqm, seqlen_q, dq_i, HEAD_DIM, BLOCK_M, BLOCK_D, WIDE)
        row_hk = b * seqlen_k * num_heads_kv + hk
        if dk is not None:
            stride = num_heads_kv * HEAD_DIM
            store_tile(dk + row_hk * HEAD_DIM, n, stride, seqlen_k, dk_j * softmax_scale, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
        if dv is not None:
            stride = num_heads_kv * HEAD_DIM_V
            store_tile(dv + row_hk * HEAD_DIM_V, n, stride, seqlen_k, dv_j, HEAD_DIM_V, BLOCK_N, BLOCK_DV, WIDE)
        tl.debug_barrier()  # as in the forward


# (family, largest head dimension) -> tiles forward and backward.
_TILES: dict[str, tuple[tuple[int, Tile, Tile], ...]] = {
    "sm90": ((64, Tile(128, 128, 8, 2), Tile(64, 128, 8, 2)), (128, Tile(128, 128, 8, 2), Tile(64, 128, 8, 2))),
    "sm100": ((64, Tile(128, 128, 8, 2), Tile(64, 128, 8, 2)), (128, Tile(128, 128, 8, 2), Tile(64, 64, 8, 1))),
    "sm80": ((64, Tile(64, 128, 4, 2), Tile(64, 64, 4, 2)), (128, Tile(64, 64, 4, 2), Tile(32, 64, 8, 1))),
    "sm86": ((64, Tile(64, 128, 4, 2), Tile(64, 64, 4, 1)), (128, Tile(64, 64, 4, 1), Tile(32, 64, 8, 1))),
    "sm75": ((64, Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)), (128, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))),
    "hip": ((64, Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)), (128, Tile(64, 32, 4, 1), Tile(32, 32, 4, 1))),
    "interpreter": ((128, Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),),
}


def tiles(problem: AttentionProblem, target: Target) -> tuple[Tile, Tile]:
    """Tiles of the forward and the backward pass."""
    dim = block_dim(max(problem.head_dim, problem.head_dim_v))
    return next(row[1:] for row in _TILES[family(target)] if dim <= row[0])


def supports(problem: AttentionProblem, target: Target) -> str | None:
    if target.kind == "torch":
        return "it needs a GPU with Triton"
    if problem.dtype.itemsize != 2 and not (problem.dtype is torch.float32 and target.kind == "interpreter"):
        return f"it takes float16 and bfloat16 inputs, and these are {problem.dtype}"
    if problem.dtype is torch.bfloat16 and target.kind == "cuda" and target.arch == 75:
        return "Turing has no bfloat16 arithmetic"
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        return f"head dimensions above {_MAX_HEAD_DIM} are not supported, got {problem.head_dim} and {problem.head_dim_v}"
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
            return f"it is kept to plain and causal attention for study, without {name}"
    return None


def describe_tile(problem: AttentionProblem, target: Target) -> str:
    forward, backward = tiles(problem, target)
    return f"forward {forward}, backward {backward}"


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    o = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=torch.float32)
    l = q.new_zeros(problem.lse_shape, dtype=torch.float32)
    m = q.new_full(problem.lse_shape, float("-inf"), dtype=torch.float32)
    tensors, device = (q, k, v, o, l, m), problem.device
    key = ("fa1.forward", problem, q.stride(), k.stride(), v.stride())
    launch.run(key, device, tensors, lambda: forward_launch(problem, tensors, tiles(problem, target_of(device))[0]))
    return o.to(q.dtype), m * LN_2 + l.log()


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    needs: Needs,
) -> Grads:  # fmt: skip
    q, k, v = inputs[:3]
    dout = torch.zeros_like(out) if dout is None else dout
    dq = q.new_zeros(q.shape, dtype=torch.float32) if needs.q else None
    dk = k.new_empty(k.shape) if needs.k else None
    dv = v.new_empty(v.shape) if needs.v else None
    tensors, device = (q, k, v, out, dout, lse, dlse, dq, dk, dv), problem.device
    key = ("fa1.backward", problem, needs, *(None if t is None else t.stride() for t in (q, k, v, dout, dlse)))
    launch.run(key, device, tensors, lambda: backward_launch(problem, tensors, tiles(problem, target_of(device))[1]))
    return Grads(None if dq is None else dq.to(q.dtype), dk, dv)


# Launch records. Tensors may be on the meta device.


def forward_launch(problem: AttentionProblem, tensors: tuple[Tensor | None, ...], tile: Tile) -> Launch:
    q, k, v = tensors[:3]
    return _record(_attn_fwd_kernel, problem.num_heads, problem, tensors, tile, _strides(q=q, k=k, v=v))


def backward_launch(problem: AttentionProblem, tensors: tuple[Tensor | None, ...], tile: Tile) -> Launch:
    q, k, v, _, dout, _, dlse = tensors[:7]
    strides = (0, 0, 0) if dlse is None else dlse.stride()
    args = {**_strides(q=q, k=k, v=v, do=dout), **dict(zip(("stride_dlb", "stride_dlh", "stride_dlm"), strides, strict=True))}
    return _record(_attn_bwd_kernel, problem.num_heads_kv, problem, tensors, tile, args)


def _strides(**tensors: Tensor | None) -> dict[str, int]:
    """stride_<name><axis> in elements. Rows are axis m for queries, n for keys."""
    strides = {}
    for name, t in tensors.items():
        for axis, stride in zip(("b", "n" if name in "kv" else "m", "h"), t.stride(), strict=False):
            strides[f"stride_{name}{axis}"] = stride
    return strides


def _record(
    kernel: Any, heads: int, problem: AttentionProblem, tensors: tuple[Tensor | None, ...], tile: Tile, strides: dict[str, int]
) -> Launch:
    # Offsets within a tile are 32-bit unless some row stride is so long that a tile spans 2^31 elements.
    longest = max(t.stride(1) for t in tensors if t is not None and t.dim() == 4)
    args = {
        **strides,
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
        "WIDE": longest * max(tile.block_m, tile.block_n) >= 2**31,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_dim(problem.head_dim),
        "BLOCK_DV": block_dim(problem.head_dim_v),
    }
    return Launch(kernel, (problem.batch * heads,), tensors, args, tile.num_warps, tile.num_stages)
