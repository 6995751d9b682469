"""Peers outside Speedlight and torch's SDPA: FlexAttention, FlashAttention-3 and FlashAttention-4."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .interface import Attention, Implementation, cu_seqlens

HALF = (torch.bfloat16, torch.float16)


class Flex(Implementation):
    """torch.compile(flex_attention) with block masks built beforehand, compiled for each static shape."""

    name = "flex"
    compiles = True

    def supports(self, case: Case) -> str | None:
        if case.device == "cpu":
            return "FlexAttention has no backward on the CPU"
        return None

    def make(self, case: Case) -> Attention:
        import torch._dynamo
        import torch._functorch.config as functorch_config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # With donated buffers a backward may run once only; timing repeats it.
        functorch_config.donated_buffer = False
        # Entries of earlier shapes would be searched in every call, and the recompile limit reached.
        torch._dynamo.reset()
        flex = torch.compile(flex_attention, dynamic=False)
        visible = self._visible(case)
        block_mask = None
        if visible is not None:
            block_mask = create_block_mask(visible, None, None, case.seqlen, case.seqlen, device=case.device)
        gqa, packed = case.num_heads != case.num_heads_kv, bool(case.lengths)

        def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if packed:
                q, k, v = q[None], k[None], v[None]
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out = flex(q, k, v, block_mask=block_mask, enable_gqa=gqa).transpose(1, 2)
            return out[0] if packed else out

        return attn

    @staticmethod
    def _visible(case: Case) -> Callable[..., Tensor] | None:
        """The mask function; None where every pair is visible."""
        left = case.window_left
        if case.lengths:
            counts = torch.tensor(case.lengths, device=case.device)
            sequence = torch.repeat_interleave(torch.arange(len(case.lengths), device=case.device), counts)
            if case.causal:
                return lambda b, h, i, j: (sequence[i] == sequence[j]) & (i >= j)
            return lambda b, h, i, j: sequence[i] == sequence[j]
        if left is not None:
            if case.causal:
                return lambda b, h, i, j: (i >= j) & (i - j <= left)
            return lambda b, h, i, j: i - j <= left
        if case.causal:
            return lambda b, h, i, j: i >= j
        return None


class Fa3Cuda(Implementation):
    """FlashAttention-3's CUDA extension: fa3_C.so and libcudart.so.12 in the directory FA3_DIR.

    The binary is the one inside the xformers 0.0.34 wheel; it registers torch.ops.flash_attn_3 and needs a Hopper GPU.
    """

    name = "fa3_cuda"

    def importable(self) -> str | None:
        folder = os.environ.get("FA3_DIR")
        if not folder:
            return "FA3_DIR is not set"
        missing = [name for name in ("libcudart.so.12", "fa3_C.so") if not (Path(folder) / name).is_file()]
        return f"FA3_DIR has no {' and no '.join(missing)}" if missing else None

    def supports(self, case: Case) -> str | None:
        if case.device != "cuda" or case.dtype not in HALF:
            return "needs a Hopper GPU and bf16 or fp16"
        return None

    def make(self, case: Case) -> Attention:
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            folder = Path(os.environ["FA3_DIR"])
            # Its CUDA 12 runtime must be visible to the extension before that is loaded.
            ctypes.CDLL(str(folder / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
            torch.ops.load_library(str(folder / "fa3_C.so"))
        cu, longest = (cu_seqlens(case), max(case.lengths)) if case.lengths else (None, None)
        left = -1 if case.window_left is None else case.window_left
        options: dict[str, Any] = {
            "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest,
            "softmax_scale": case.head_dim**-0.5,
            # The op wants either the causal flag or a window whose right side is 0.
            "is_causal": case.causal and left < 0,
            "window_size_left": left, "window_size_right": 0 if case.causal and left >= 0 else -1,
        }  # fmt: skip
        return lambda q, k, v: _Fa3Function.apply(q, k, v, options)


class _Fa3Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **options)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd(dout.contiguous(), q, k, v, out, lse, dq, dk, dv, **ctx.options)
        return dq, dk, dv, None


class Fa4(Implementation):
    """FlashAttention-4 (CuTe DSL), if flash_attn.cute is importable."""

    name = "fa4"
    compiles = True

    def importable(self) -> str | None:
        try:
            import flash_attn.cute  # noqa: F401
        except Exception as error:  # its imports fail in many ways besides ImportError
            return f"flash_attn.cute does not import: {type(error).__name__}"
        return None

    def supports(self, case: Case) -> str | None:
        if case.device != "cuda" or case.dtype not in HALF:
            return "needs a GPU and bf16 or fp16"
        return None

    def make(self, case: Case) -> Attention:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        options: dict[str, Any] = {"causal": case.causal}
        if case.window_left is not None:
            options["window_size"] = (case.window_left, 0 if case.causal else None)
        if case.lengths:
            cu, longest = cu_seqlens(case), max(case.lengths)
            options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        function = flash_attn_varlen_func if case.lengths else flash_attn_func

        def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return attn
