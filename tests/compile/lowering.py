"""Kernels compiled for GPUs that are not there, and what their machine code shows.

``kernels`` runs a backend's own forward and backward on meta tensors and keeps the launches instead of launching them,
so what is compiled here is what a call would launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from speedlight import launch
from speedlight.backends.contract import Needs
from speedlight.problem import AttentionProblem, describe
from speedlight.target import Target

TARGETS = tuple(Target.parse(name) for name in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"))

# The instruction that computes on the matrix units. Turing has some, but Triton no longer emits them.
MATRIX_INSTRUCTION = {
    "sm_75": None, "sm_80": "HMMA", "sm_86": "HMMA", "sm_89": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA",
    "sm_120": "HMMA", "gfx942": "v_mfma",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A problem to compile for. ``odd`` head dimensions fill their blocks only in part."""

    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    odd: bool = False
    varlen: bool = False
    seqused: bool = False
    group_size: int = 1
    tf32: bool = False
    dlse: bool = False
    ragged: bool = False  # lengths that are no multiple of the blocks
    needs: Needs = Needs()
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def build(self) -> tuple[AttentionProblem, Any, bool]:
        heads, length = 4 * self.group_size, 4096 - 5 * self.ragged
        head_dim = self.head_dim - 3 if self.odd else self.head_dim
        head_dim_v = self.head_dim - 8 if self.odd else self.head_dim
        shapes = ((heads, head_dim), (4, head_dim), (4, head_dim_v))
        lead = (length,) if self.varlen else (2, length)
        q, k, v = (torch.empty(*lead, *shape, dtype=self.dtype, device="meta") for shape in shapes)
        options = dict(self.options)
        cu: tuple[Any, ...] = ()
        if self.varlen:
            cu = tuple(torch.empty(3, dtype=torch.int32, device="meta") for _ in range(2))
        if self.seqused:
            options |= {f"seqused_{side}": torch.empty(2, dtype=torch.int32, device="meta") for side in "qk"}
        problem, inputs = describe(q, k, v, *cu, **options)
        if self.tf32:
            problem = dataclasses.replace(problem, fp32_precision="tf32")
        return problem, inputs, self.dlse


@contextlib.contextmanager
def _captured(backend: ModuleType, target: Target) -> Iterator[dict[str, launch.Launch]]:
    found: dict[str, launch.Launch] = {}

    def keep(key: Any, device: Any, tensors: Any, build: Any) -> None:
        record = build()
        found[record.kernel.__name__] = record

    with mock.patch.object(launch, "run", keep), mock.patch.object(backend, "target_of", lambda device: target):
        yield found


def kernels(backend: ModuleType, target: Target, variant: Variant) -> dict[str, launch.Launch]:
    """The launches of a forward and a backward, by kernel name."""
    problem, inputs, with_dlse = variant.build()
    reason = backend.supports(problem, target)
    assert reason is None, reason
    with _captured(backend, target) as found:
        out, lse = backend.forward(problem, inputs)
        dlse = torch.empty_like(lse) if with_dlse else None
        backend.backward(problem, inputs, out, lse, torch.empty_like(out), dlse, variant.needs)
    return found


@dataclass(frozen=True)
class Code:
    """What a compiled kernel shows."""

    kernel: str
    shared: int
    registers: int
    spills: int  # bytes of local memory per thread (cuda), spilled registers (hip)
    text: str  # SASS or GCN assembly
    ptx: str = ""
    cubin: bytes = b""

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}", self.text))


def code(record: launch.Launch, target: Target) -> Code:
    compiled = launch.lower(record, target)
    name, shared = record.kernel.__name__, compiled.metadata.shared
    if target.kind == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = (int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count"))
        return Code(name, shared, registers, spills, text)
    cubin = compiled.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        usage = _tool("cuobjdump", "-res-usage", path)
        text = _tool("nvdisasm", "-c", path)
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Code(name, shared, registers, stack, text, compiled.asm["ptx"], cubin)


def _tool(name: str, *arguments: str) -> str:
    from triton import knobs

    path = getattr(knobs.nvidia, name).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
