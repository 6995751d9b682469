"""Kernel launches as data.

A ``Launch`` is everything a kernel launch needs. ``prepare`` runs it once and returns a ``Prepared`` that repeats it
with other tensors at the cost of the driver call: Triton's own path binds and specialises every argument anew, which
costs more host time than the launch. ``lower`` compiles the same record for any GPU without having one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from .target import Target, interpreting

_POINTER_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass
class Launch:
    """One launch. ``tensors`` are the kernel's leading parameters, in order, None where an option is off; ``args``
    holds every other parameter by name, constexprs included."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[Tensor | None, ...]
    args: dict[str, Any]
    num_warps: int
    num_stages: int
    options: dict[str, Any] = field(default_factory=dict)

    def bound(self) -> list[Any]:
        """All arguments in the kernel's parameter order."""
        names = self.kernel.arg_names[len(self.tensors) :]
        assert len(names) == len(self.args), set(names) ^ set(self.args)
        return [*self.tensors, *(self.args[name] for name in names)]

    def meta(self) -> dict[str, Any]:
        # Fusing a*b+c is what the kernels are written for; Triton 3.10 turns it off unless asked.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **self.options}


class Prepared:
    """A launch that has been compiled and loaded; calling it with tensors of the same layout launches again."""

    __slots__ = ("args", "function", "grid", "launch", "metadata", "run")

    def __init__(self, launch: Launch, compiled: Any):
        self.launch = launch
        self.grid = (*launch.grid, 1, 1)[:3]
        self.args = tuple(launch.bound()[len(launch.tensors) :])
        self.run = None if compiled is None else compiled.run
        self.function = None if compiled is None else compiled.function
        self.metadata = None if compiled is None else compiled.packed_metadata
        launch.tensors = ()  # keep no tensor alive

    def __call__(self, device_index: int, *tensors: Tensor | None) -> None:
        hook = knobs.runtime.launch_enter_hook
        if self.run is None or (hook is not None and getattr(hook, "calls", True)):  # a profiler listens
            launch = self.launch
            launch.kernel[launch.grid](*tensors, **launch.args, **launch.meta())
            return
        # Plain integers for pointers: given tensors, the launcher asks the driver about each of them.
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        self.run(
            *self.grid, stream, self.function, self.metadata, None, None, None,
            *[None if t is None else t.data_ptr() for t in tensors], *self.args,
        )  # fmt: skip


_PREPARED: dict[Any, Prepared] = {}
_PREPARED_LIMIT = 8192


def run(key: Any, device: torch.device, tensors: tuple[Tensor | None, ...], build: Any) -> None:
    """Launch on ``device``'s current stream. ``key`` must fix everything that ``build() -> Launch`` depends on but the
    tensors' addresses; their alignment, which Triton specialises on, is added here."""
    if not interpreting():
        index = device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return run(key, device, tensors, build)
        bits = 0
        for t in tensors:
            if t is not None:
                bits |= t.data_ptr()
        aligned: Any = True if bits & 15 == 0 else tuple(t is not None and t.data_ptr() & 15 == 0 for t in tensors)
        key = (key, device, aligned)
        prepared = _PREPARED.get(key)
        if prepared is not None:
            return prepared(index, *tensors)
    launch = build()
    compiled = launch.kernel[launch.grid](*tensors, **launch.args, **launch.meta())
    if not interpreting():
        if len(_PREPARED) >= _PREPARED_LIMIT:
            _PREPARED.clear()
        _PREPARED[key] = Prepared(launch, compiled)
    return None


def lower(launch: Launch, target: Target) -> Any:
    """Compile a launch for ``target`` without a GPU. Tensors may be on the meta device; their addresses count as
    aligned. Returns Triton's compiled kernel (``.asm``, ``.metadata``)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for parameter, value in zip(launch.kernel.params, launch.bound(), strict=True):
        name, where, free = parameter.name, (parameter.num,), parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            signature[name], constexprs[where] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = _POINTER_TYPES[value.dtype]
            attributes[where] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[where] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    gpu = GPUTarget(target.kind, target.arch, 64 if str(target.arch).startswith("gfx9") else 32)
    return triton.compile(source, target=gpu, options=launch.meta())
