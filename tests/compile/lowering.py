"""Kernels compiled for GPUs that are not there, and what their machine code shows.

``launches`` runs a backend's own forward and backward on meta tensors and keeps the launches instead of launching them,
so what is compiled here, tiles included, is what a call would launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from cases import same_segment, weighted_distance

from speedlight import Bias, Mask, launch
from speedlight.backends import fa3
from speedlight.backends.contract import Needs
from speedlight.problem import describe
from speedlight.target import Target

TARGETS = tuple(map(Target.parse, ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")))


ALL = Needs()


@dataclass(frozen=True)
class Variant:
    """A call to compile for."""

    name: str
    head_dim: int
    dtype: torch.dtype
    head_dim_v: int | None = None  # None: as head_dim
    varlen: bool = False
    seqused: bool = False
    group_size: int = 1
    tf32: bool = False
    dlse: bool = False
    seqlen: int = 4096
    needs: Needs = ALL
    terms: str = ""  # "tensors" or "functions": ALiBi, a bias, a mask, a sink and dropout
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def block_dim(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()


def plain(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant("plain", head_dim, dtype)


def causal(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant("causal", head_dim, dtype, options=dict(causal=True))


def deterministic(head_dim: int, dtype: torch.dtype) -> Variant:
    return Variant("deterministic", head_dim, dtype, options=dict(causal=True, deterministic=True))


def everything(head_dim: int, dtype: torch.dtype) -> Variant:
    """All options at once, and head dimensions that leave part of their blocks empty but rows aligned to 16 bytes."""
    return Variant(
        "everything", head_dim - 8, dtype, head_dim - 16, varlen=True, seqused=True, group_size=2, dlse=True,
        options=dict(window=(100, 50), softcap=5.0),
    )  # fmt: skip


def modified(terms: str) -> Callable[[int, torch.dtype], Variant]:
    """Causal, with everything that is added to scores or hides them, and its gradients."""

    def variant(head_dim: int, dtype: torch.dtype) -> Variant:
        needs = Needs(True, True, True, True, terms == "tensors", True)
        options = dict(causal=True, softcap=5.0, dropout_p=0.1)
        return Variant(terms, head_dim, dtype, seqlen=1024, group_size=2, needs=needs, terms=terms, options=options)

    return variant


def unaligned(head_dim: int, dtype: torch.dtype) -> Variant:
    """As ``everything``, with rows that start anywhere."""
    return dataclasses.replace(everything(head_dim, dtype), name="unaligned", head_dim=head_dim - 3)


def launches(backend: ModuleType, target: Target, variant: Variant) -> dict[str, launch.Launch] | str:
    """The launches of a forward and a backward by kernel name, or why the backend refuses the call."""
    heads, head_dim_v = 4 * variant.group_size, variant.head_dim_v or variant.head_dim
    shapes = ((heads, variant.head_dim), (4, variant.head_dim), (4, head_dim_v))
    rows = (variant.seqlen,) if variant.varlen else (2, variant.seqlen)
    q, k, v = (torch.empty(*rows, *shape, dtype=variant.dtype, device="meta") for shape in shapes)
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    options = dict(variant.options)
    if variant.seqused:
        options |= dict(seqused_q=lengths[:2], seqused_k=lengths[:2])
    if variant.terms:
        meta = functools.partial(torch.empty, device="meta")
        options |= dict(
            alibi_slopes=meta(heads), sink=meta(heads), dropout_seed=meta(1, dtype=torch.int64),
            bias=meta(1, heads, variant.seqlen, variant.seqlen), mask=meta(variant.seqlen, dtype=torch.bool),
        )  # fmt: skip
    if variant.terms == "functions":
        along = [(axis, meta(n)) for axis, n in (("head", heads), ("q", variant.seqlen), ("kv", variant.seqlen))]
        segments = [(axis, meta(variant.seqlen, dtype=torch.int32)) for axis in ("q", "kv")]
        options |= dict(bias=Bias(weighted_distance, along), mask=Mask(same_segment, segments))
    problem, inputs = describe(q, k, v, *((lengths, lengths) if variant.varlen else ()), **options)
    if variant.tf32:
        problem = dataclasses.replace(problem, fp32_precision="tf32")
    with mock.patch.object(fa3, "unverified", lambda: None):
        reason = backend.supports(problem, target)
    if reason is not None:
        return reason
    with _captured(backend, target) as found:
        out, lse = backend.forward(problem, inputs)
        dout, dlse = torch.empty_like(out), torch.empty_like(lse) if variant.dlse else None
        backend.backward(problem, inputs, out, lse, dout, dlse, variant.needs)
    return found


@contextlib.contextmanager
def _captured(backend: ModuleType, target: Target) -> Iterator[dict[str, launch.Launch]]:
    found: dict[str, launch.Launch] = {}

    def keep(key: Any, device: Any, tensors: Any, build: Any) -> None:
        records = build()
        for record in [records] if isinstance(records, launch.Launch) else records:
            name = record.kernel.__name__.removeprefix("_attn_").removesuffix("_kernel")
            if name == "bwd" and "dk" not in record.tensors:
                name = "bwd_dv"
            found[name] = record

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(launch, "run", keep))
        if backend is fa3:
            counter = torch.empty(2, dtype=torch.int32, device="meta")
            patches.enter_context(mock.patch.object(fa3, "_counter", lambda device: counter))
            patches.enter_context(mock.patch.object(fa3, "_num_sms", lambda device: 132))
            patches.enter_context(mock.patch.object(fa3, "OWN_BACKWARD", True))
        else:
            patches.enter_context(mock.patch.object(backend, "target_of", lambda device: target))
        yield found


@dataclass(frozen=True)
class Code:
    """What a compiled kernel shows."""

    shared: int  # bytes
    registers: int
    spills: int  # bytes per thread on the stack (cuda), spilled registers (hip)
    asm: Any  # Triton's dictionary of every stage

    @cached_property
    def text(self) -> str:
        """SASS or GCN assembly."""
        if "amdgcn" in self.asm:
            return self.asm["amdgcn"]
        return _inspect(self.asm["cubin"], "nvdisasm", "-c")

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}", self.text))


def compile_code(record: launch.Launch, target: Target) -> Code:
    compiled = launch.lower(record, target)
    shared, asm = compiled.metadata.shared, compiled.asm
    if target.kind == "hip":
        text = asm["amdgcn"]
        return Code(shared, _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.vgpr_spill_count:\s+(\d+)", text), asm)
    usage = _inspect(asm["cubin"], "cuobjdump", "-res-usage")
    return Code(shared, _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), asm)


def _inspect(cubin: bytes, tool: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return _tool(tool, *arguments, path)


def assembler_notes(code: Code) -> list[str]:
    """What ptxas says about serialised matrix instructions (its notes C7510 to C7519) when it assembles sm_90 code."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(code.asm["ptx"])
        arguments = ("-v", "--gpu-name=sm_90a", source, "-o", Path(folder, "kernel.cubin"))
        said = ""
        for assembler in ("ptxas", "ptxas_blackwell"):  # the first may be older than the PTX
            said = _tool(assembler, *arguments, check=False)
            if "ptxas fatal" not in said:
                return re.findall(r".*C751\d.*", said)
    raise AssertionError(said)


def _tool(name: str, *arguments: Any, check: bool = True) -> str:
    from triton import knobs

    done = subprocess.run([getattr(knobs.nvidia, name).path, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout + done.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, pattern
    return int(found[1])
