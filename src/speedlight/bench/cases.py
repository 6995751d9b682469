"""The named problems. A name is a path, ``suite/.../size``; folders and globs pick: ``grid/d64``, ``grid/*/s4096``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..io_model import Workload

DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip

# Drawn once: 16 sequences from 4096 tokens to 7, 16384 tokens in all.
PACKED_LENGTHS = (4096, 3072, 2048, 1792, 1024, 1000, 777, 640, 512, 500, 300, 256, 200, 100, 60, 7)


@dataclass(frozen=True)
class Case:
    """One self-attention problem and the way to measure it.

    q is (batch, seqlen, num_heads, head_dim), k and v have num_heads_kv heads; with ``lengths`` sequences are packed to
    (seqlen, heads, head_dim). ``window_left``: keys visible to the left of a query's own position.
    """

    name: str
    seqlen: int
    num_heads: int
    head_dim: int
    batch: int = 1
    num_heads_kv: int = 0  # 0: as many as num_heads
    causal: bool = True
    window_left: int | None = None
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"  # "cuda", "cpu" or, before resolution, "any"
    mode: str = "timed"  # timed | sustained | host | memory
    optional: bool = False  # only when named more closely than by its suite

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads_kv", self.num_heads_kv or self.num_heads)

    @property
    def suite(self) -> str:
        return self.name.split("/")[0]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of q and of k and v."""
        lead = (self.seqlen,) if self.lengths else (self.batch, self.seqlen)
        return (*lead, self.num_heads, self.head_dim), (*lead, self.num_heads_kv, self.head_dim)

    def workload(self) -> Workload:
        lengths = tuple((n, n) for n in self.lengths) or ((self.seqlen, self.seqlen),) * self.batch
        return Workload.packed(
            lengths, self.num_heads, self.head_dim, num_heads_kv=self.num_heads_kv, causal=self.causal,
            window=(self.window_left, None), itemsize=self.dtype.itemsize,
        )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """What a result row says about its case."""
        return {
            "case": self.name, "suite": self.suite, "mode": self.mode, "device": self.device, "dtype": self.dtype_name,
            "batch": len(self.lengths) or self.batch, "seqlen": self.seqlen, "num_heads": self.num_heads,
            "num_heads_kv": self.num_heads_kv, "head_dim": self.head_dim, "causal": self.causal,
            "window_left": self.window_left, "lengths": list(self.lengths),
        }  # fmt: skip

    def resolved(self, device: str | None, dtype: str | None) -> Case:
        """With the asked device and dtype, or its own."""
        device = device or (("cuda" if torch.cuda.is_available() else "cpu") if self.device == "any" else self.device)
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{self.name} is for a GPU and torch sees none; --device cpu runs it here, slowly")
        return replace(self, device=device, dtype=DTYPES[dtype] if dtype else self.dtype)


def _all() -> list[Case]:
    cases = []
    # FA-3's setting: 16k tokens, hidden size 2048 (Shah et al. 2024, section 4.1).
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                name = f"grid/d{head_dim}/{'causal' if causal else 'full'}/s{seqlen}"
                heads, batch, rare = 2048 // head_dim, 16384 // seqlen, head_dim == 256
                cases.append(Case(name, seqlen, heads, head_dim, batch, causal=causal, optional=rare))
    cases += [
        *(Case(f"long/s{seqlen}", seqlen, 16, 128) for seqlen in (65536, 131072)),
        Case("sustained/d64", 8192, 32, 64, 2, mode="sustained"),
        Case("sustained/d128", 8192, 16, 128, 2, mode="sustained"),
        Case("gqa/h32x8", 8192, 32, 128, 2, num_heads_kv=8),
        Case("varlen/n16", sum(PACKED_LENGTHS), 16, 128, lengths=PACKED_LENGTHS),
        Case("window/w1024", 16384, 16, 128, window_left=1023),
        Case("host/tiny", 256, 2, 128, mode="host"),
        Case("memory/s2048", 2048, 12, 64, 16, dtype=torch.float16, mode="memory"),
        Case("memory/s16384", 16384, 16, 128, mode="memory"),
    ]
    for short, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for seqlen in (2048, 4096, 8192):
            cases.append(Case(f"cpu/{short}/s{seqlen}", seqlen, 8, 64, dtype=dtype, device="cpu"))
    for seqlen in (2048, 8192, 32768):
        cases.append(Case(f"cpu/memory/s{seqlen}", seqlen, 8, 64, dtype=torch.float32, device="cpu", mode="memory"))
    small: dict[str, Any] = {"batch": 2, "dtype": torch.float32, "device": "any"}
    cases += [
        Case("tiny/full", 96, 2, 32, causal=False, **small),
        Case("tiny/causal", 96, 2, 32, **small),
        Case("tiny/gqa", 96, 4, 32, num_heads_kv=2, **small),
        Case("tiny/window", 96, 2, 32, window_left=20, **small),
        Case("tiny/varlen", 96, 2, 32, lengths=(50, 33, 13), **{**small, "batch": 1}),
        Case("tiny/host", 32, 2, 32, mode="host", **small),
        Case("tiny/memory", 256, 2, 32, mode="memory", **small),
        Case("tiny/sustained", 96, 2, 32, mode="sustained", **small),
    ]
    return cases


CASES: tuple[Case, ...] = tuple(_all())


def select(patterns: list[str]) -> list[Case]:
    """Cases in list order whose name matches a glob, equals a pattern or lies under it as a folder.

    A bare suite name leaves optional cases out.
    """
    chosen: dict[str, Case] = {}
    for pattern in patterns:
        found = [
            c for c in CASES
            if c.name == pattern
            or (c.name.startswith(pattern.rstrip("/") + "/") and not (c.optional and pattern.rstrip("/") == c.suite))
            or (fnmatchcase(c.name, pattern) and any(sign in pattern for sign in "*?["))
        ]  # fmt: skip
        if not found:
            raise ValueError(f"no case matches {pattern!r}; `python -m speedlight.bench list` names them all")
        chosen.update((c.name, c) for c in found)
    return [c for c in CASES if c.name in chosen]
