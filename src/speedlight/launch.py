"""Kernel launches as data.

A ``Launch`` is everything a kernel launch needs. ``run`` compiles and launches the records of one pass, and keeps a
``Prepared`` of each that repeats it with other tensors at the cost of the driver call: Triton's own path binds and
specialises every argument anew, which costs more host time than the launch. ``lower`` compiles the same record for any
GPU without having one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter, or_
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
    """One launch. ``tensors`` holds the kernel's leading parameters by name, and may hold more; one it lacks is None.
    ``args`` holds every other parameter by name, constexprs included."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    args: dict[str, Any]
    num_warps: int
    num_stages: int
    options: dict[str, Any] = field(default_factory=dict)

    def tensor_names(self) -> list[str]:
        names = self.kernel.arg_names
        leading = [name for name in names if name not in self.args]
        assert leading == names[: len(leading)] and len(leading) + len(self.args) == len(names), (names, self.args)
        return leading

    def bound(self) -> list[Any]:
        """All arguments in the kernel's parameter order."""
        leading = self.tensor_names()
        return [*map(self.tensors.get, leading), *(self.args[name] for name in self.kernel.arg_names[len(leading) :])]

    def meta(self) -> dict[str, Any]:
        # Fusing a*b+c is what the kernels are written for; Triton 3.10 turns it off unless asked.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **self.options}


class Prepared:
    """A launch that has been compiled and loaded, to be repeated with the addresses of tensors of the same layout."""

    __slots__ = ("args", "function", "grid", "metadata", "run", "take")

    def __init__(self, launch: Launch, compiled: Any, order: list[str]):
        """``order``: the names of the tensors whose addresses a repetition gets; after them comes a None."""
        names = launch.tensor_names()
        self.grid = (*launch.grid, 1, 1)[:3]
        self.args = tuple(launch.bound()[len(names) :])
        self.take = itemgetter(*(order.index(name) if name in order else -1 for name in names))
        self.run = compiled.run
        self.function = compiled.function
        self.metadata = compiled.packed_metadata

    def __call__(self, stream: int, addresses: Sequence[int | None]) -> None:
        # Plain integers for pointers: given tensors, the launcher asks the driver about each of them.
        self.run(
            *self.grid, stream, self.function, self.metadata, None, None, None, *self.take(addresses), *self.args
        )  # fmt: skip


_PLANS: dict[Any, list[Prepared]] = {}
_PLANS_LIMIT = 8192


def run(key: Any, device: torch.device, tensors: dict[str, Tensor], build: Callable[[], Launch | list[Launch]]) -> None:
    """Launch on ``device``'s current stream what takes its tensors from ``tensors``. ``key`` must fix everything that
    ``build()`` depends on but the tensors' addresses, also which of them there are; their alignment, which Triton
    specialises on, is added here."""
    if interpreting():
        _build_and_launch(build)
        return
    index = device.index
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            run(key, device, tensors, build)
        return
    pointers = list(map(Tensor.data_ptr, tensors.values()))
    aligned: Any = reduce(or_, pointers) & 15 == 0 or tuple(p & 15 == 0 for p in pointers)
    key = (key, index, aligned)
    plan = _PLANS.get(key)
    hook = knobs.runtime.launch_enter_hook
    if plan is None or (hook is not None and getattr(hook, "calls", True)):  # a profiler listens: Triton's own way
        if len(_PLANS) >= _PLANS_LIMIT:
            _PLANS.clear()
        _PLANS[key] = [Prepared(launch, compiled, list(tensors)) for launch, compiled in _build_and_launch(build)]
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    addresses = (*pointers, None)
    for prepared in plan:
        prepared(stream, addresses)


def _build_and_launch(build: Callable[[], Launch | list[Launch]]) -> list[tuple[Launch, Any]]:
    launches = build()
    launches = [launches] if isinstance(launches, Launch) else launches
    return [
        (each, each.kernel[each.grid](*map(each.tensors.get, each.tensor_names()), **each.args, **each.meta()))
        for each in launches
    ]


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
