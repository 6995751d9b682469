"""The contenders: Speedlight's backends and the peers, behind one small interface.

Each makes, for one case, a differentiable ``attn(q, k, v) -> out`` on (B, S, H, D), or (T, H, D) for packed sequences.
Everything that can be prepared (masks, cu_seqlens, libraries) is prepared in ``make``, so that the call is the call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HALF = (torch.bfloat16, torch.float16)


class Implementation:
    """One contender. ``compiles``: a first call compiles, so that warming its disk cache saves time."""

    name: str
    ours = False
    compiles = False

    def importable(self) -> str | None:
        """None, or why this machine does not have it."""
        return None

    def supports(self, case: Case) -> str | None:
        """None, or why it does not serve the case."""
        return None

    def prepare(self) -> None:
        """Untimed, before every timed forward: global switches of the call."""

    def make(self, case: Case) -> Attention:
        raise NotImplementedError


class Speedlight(Implementation):
    """``speedlight.attention`` with a backend by name, or its own choice."""

    ours = True
    compiles = True

    def __init__(self, name: str, backend: str | None) -> None:
        self.name, self.backend = name, backend

    def importable(self) -> str | None:
        try:
            import speedlight.api  # noqa: F401
        except ImportError as error:
            return f"speedlight does not import: {error}"
        return None

    def make(self, case: Case) -> Attention:
        from speedlight.api import attention, attention_varlen

        options: dict[str, Any] = {"causal": case.causal, "window": (case.window_left, None), "backend": self.backend}
        if not case.lengths:
            return lambda q, k, v: attention(q, k, v, **options)
        cu, longest = cu_seqlens(case), max(case.lengths)
        return lambda q, k, v: attention_varlen(q, k, v, cu, cu, longest, longest, **options)


class Sdpa(Implementation):
    """torch's scaled_dot_product_attention held to one of its backends, or to its own choice (``sdpa``).

    The backend is a global switch; ``prepare`` sets it outside the timed region.
    """

    def __init__(self, which: str | None) -> None:
        self.which = which
        self.name = f"sdpa_{which}" if which else "sdpa"

    def supports(self, case: Case) -> str | None:
        if case.window_left is not None:
            return "SDPA has no window argument"
        if case.device == "cpu" and self.which in ("efficient", "cudnn"):
            return "a GPU kernel"
        if case.lengths:
            if self.which != "flash":
                return "packed sequences exist for the flash backend only (torch.nn.attention.varlen)"
            if importlib.util.find_spec("torch.nn.attention.varlen") is None:
                return "this torch has no torch.nn.attention.varlen"
            if case.device == "cpu":
                return "torch.nn.attention.varlen needs a GPU"
        if self.which == "efficient" and case.num_heads != case.num_heads_kv:
            return "no GQA in the efficient backend"
        if self.which == "math":
            return _scores_too_big(case, 4)
        return None

    def prepare(self) -> None:
        use_sdpa(self.which)

    def make(self, case: Case) -> Attention:
        if case.lengths:
            return self._make_packed(case)
        sdpa, causal, gqa = torch.nn.functional.scaled_dot_product_attention, case.causal, case.num_heads != case.num_heads_kv

        def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return sdpa(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)

        return attn

    @staticmethod
    def _make_packed(case: Case) -> Attention:
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {}
        if "is_causal" in known:  # torch 2.10
            options["is_causal"] = case.causal
        else:
            options["window_size"] = (-1, 0 if case.causal else -1)
        if case.num_heads != case.num_heads_kv and "enable_gqa" in known:
            options["enable_gqa"] = True
        cu, longest = cu_seqlens(case), max(case.lengths)
        return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, **options)


def use_sdpa(which: str | None) -> None:
    """Let SDPA choose among all its backends (None) or have only one."""
    switch = torch.backends.cuda
    switch.enable_flash_sdp(which in (None, "flash"))
    switch.enable_mem_efficient_sdp(which in (None, "efficient"))
    switch.enable_math_sdp(which in (None, "math"))
    switch.enable_cudnn_sdp(which in (None, "cudnn"))


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


class Eager(Implementation):
    """Textbook attention: matmul, mask, softmax, matmul, in the input dtype. Also the yardstick of the gate."""

    name = "eager"

    def supports(self, case: Case) -> str | None:
        return _scores_too_big(case, case.dtype.itemsize)

    def make(self, case: Case) -> Attention:
        group, scale = case.num_heads // case.num_heads_kv, case.head_dim**-0.5
        hidden: dict[int, Tensor] = {}
        if case.causal or case.window_left is not None:
            for n in set(case.lengths or (case.seqlen,)):
                hidden[n] = hidden_pairs(n, case.causal, case.window_left, case.device)

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:
                k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            scores = (q * scale) @ k.transpose(-1, -2)
            if hidden:
                scores = scores.masked_fill(hidden[q.shape[2]], float("-inf"))
            return (scores.softmax(-1) @ v).transpose(1, 2)

        if not case.lengths:
            return dense
        lengths = list(case.lengths)

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(q[None].split(lengths, 1), k[None].split(lengths, 1), v[None].split(lengths, 1), strict=True)
            return torch.cat([dense(*part) for part in parts], 1)[0]

        return packed


def hidden_pairs(seqlen: int, causal: bool, window_left: int | None, device: str) -> Tensor:
    """(S, S) bool, True where query i may not see key j."""
    distance = torch.arange(seqlen, device=device)[:, None] - torch.arange(seqlen, device=device)
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden if window_left is None else hidden | (distance > window_left)


def cu_seqlens(case: Case) -> Tensor:
    """(n + 1,) int32 row offsets of packed sequences."""
    return torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=case.device)


def _scores_too_big(case: Case, itemsize: int) -> str | None:
    """Whoever holds a score matrix has about four of its size at once in forward and backward."""
    heads = case.num_heads * (1 if case.lengths else case.batch)
    need = 4 * heads * itemsize * sum(n * n for n in case.lengths or (case.seqlen,))
    free = torch.cuda.mem_get_info()[0] if case.device == "cuda" else _available_memory()
    return f"its score matrices need {need / 2**30:.0f} GiB" if need > 0.9 * free else None


def _available_memory() -> int:
    """Bytes of main memory to be had without swapping; 8 GiB where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 8 << 30


IMPLEMENTATIONS: dict[str, Implementation] = {
    each.name: each
    for each in (
        Speedlight("speedlight", None), Speedlight("fa1", "fa1"), Speedlight("fa2", "fa2"), Speedlight("fa3", "fa3"),
        Speedlight("cpu", "cpu"), Sdpa(None), Sdpa("math"), Sdpa("efficient"), Sdpa("flash"), Sdpa("cudnn"), Flex(),
        Fa3Cuda(), Fa4(), Eager(),
    )
}  # fmt: skip

DEFAULTS = {
    "cuda": ("fa2", "fa1", "fa3", "sdpa_flash", "sdpa_cudnn", "flex", "fa3_cuda", "fa4"),
    "cpu": ("cpu", "sdpa", "eager"),
}
