"""Speedlight's backends, torch's SDPA and textbook attention, and the list of all contenders."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .interface import Attention, Implementation, cu_seqlens
from .peers import Fa3Cuda, Fa4, Flex


class Speedlight(Implementation):
    """``speedlight.attention`` with a backend by name, or its own choice."""

    ours = True

    def __init__(self, name: str, backend: str | None) -> None:
        self.name, self.backend, self.compiles = name, backend, backend != "cpu"

    def importable(self) -> str | None:
        try:
            import speedlight.api  # noqa: F401
        except ImportError as error:
            return f"speedlight does not import: {error}"
        if self.backend and importlib.util.find_spec(f"speedlight.backends.{self.backend}") is None:
            return f"this speedlight has no backend {self.backend}"
        return None

    def make(self, case: Case) -> Attention:
        from speedlight.api import attention, attention_varlen

        options: dict[str, Any] = {"causal": case.causal, "window": (case.window_left, None), "backend": self.backend}
        if not case.lengths:
            return lambda q, k, v: attention(q, k, v, **options)  # type: ignore[return-value]
        cu, longest = cu_seqlens(case), max(case.lengths)
        return lambda q, k, v: attention_varlen(q, k, v, cu, cu, longest, longest, **options)  # type: ignore[return-value]


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
        sdpa = torch.nn.functional.scaled_dot_product_attention
        causal, gqa = case.causal, case.num_heads != case.num_heads_kv

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
        return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, **options)  # type: ignore[return-value]


def use_sdpa(which: str | None) -> None:
    """Let SDPA choose among all its backends (None) or have only one."""
    switch = torch.backends.cuda
    switch.enable_flash_sdp(which in (None, "flash"))
    switch.enable_mem_efficient_sdp(which in (None, "efficient"))
    switch.enable_math_sdp(which in (None, "math"))
    switch.enable_cudnn_sdp(which in (None, "cudnn"))


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
