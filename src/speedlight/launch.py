"""Kernel launches as data.

A ``Launch`` is everything a kernel launch needs. ``run`` compiles and launches the records of one pass, and keeps a
``Prepared`` of each that repeats it with other tensors at the cost of the driver call: Triton's own path binds and
specialises every argument anew, which costs more host time than the launch. ``lower`` compiles the same record for any
GPU without having one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import reduce
from inspect import isfunction
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


@dataclass(frozen=True)
class Descriptor:
    """How TMA sees a tensor: the tensor's name, sizes, strides in elements (the last is 1), and the block of a copy."""

    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass
class Launch:
    """One launch. ``tensors`` holds the kernel's leading parameters by name, and may hold more; one it lacks is None.
    Those in ``descriptors`` go to the kernel as TMA descriptors (Gluon kernels only). ``args`` holds every other
    parameter by name, constexprs included."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    args: dict[str, Any]
    num_warps: int
    num_stages: int
    options: dict[str, Any] = field(default_factory=dict)
    descriptors: dict[str, Descriptor] = field(default_factory=dict)

    def tensor_names(self) -> list[str]:
        names = self.kernel.arg_names
        leading = [name for name in names if name not in self.args]
        assert leading == names[: len(leading)] and len(leading) + len(self.args) == len(names), (names, self.args)
        return leading

    def bound(self) -> list[Any]:
        """All arguments in the kernel's parameter order."""
        leading = self.leading()
        return [*leading.values(), *(self.args[name] for name in self.kernel.arg_names[len(leading) :])]

    def leading(self) -> dict[str, Any]:
        """Tensor, descriptor or None for each leading parameter."""
        values: dict[str, Any] = {}
        for name in self.tensor_names():
            d = self.descriptors.get(name)
            values[name] = self.tensors.get(name) if d is None else _tensor_descriptor(self.tensors[d.tensor], d)
        return values

    def meta(self) -> dict[str, Any]:
        # Fusing a*b+c is what the kernels are written for; Triton 3.10 turns it off unless asked.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **self.options}


class Prepared:
    """A launch that has been compiled and loaded, to be repeated with the addresses of tensors of the same layout."""

    __slots__ = ("args", "fixed", "grid", "run", "take")

    def __init__(self, launch: Launch, compiled: Any, order: list[str]):
        """``order``: the names of the tensors whose addresses a repetition gets; after them comes a None."""
        leading = launch.leading()
        self.grid = (*launch.grid, 1, 1)[:3]
        self.args = tuple(launch.bound()[len(leading) :])
        self.run: Any = compiled.run
        # Of Triton's launcher: the function, its metadata, and no launch metadata and hooks.
        self.fixed: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        names = (launch.descriptors[name].tensor if name in launch.descriptors else name for name in leading)
        indices = [order.index(name) if name in order else -1 for name in names]
        self.take: Any = itemgetter(*indices)
        if launch.descriptors:
            raw = _raw_launcher(compiled)
            if raw is None:
                self.take = _Descriptors(leading, indices)
            else:
                how = compiled.run.launch_cooperative_grid, compiled.run.launch_pdl
                self.run = raw
                self.fixed = (compiled.function, *how, None, None, *self.fixed[1:])
                self.take = _TensorMaps(_encoders(compiled, leading), indices)

    def __call__(self, stream: int, addresses: Sequence[int | None]) -> None:
        # Plain integers for pointers: given tensors, the launcher asks the driver about each of them.
        self.run(*self.grid, stream, *self.fixed, *self.take(addresses), *self.args)


# TMA descriptors. Triton encodes each anew in every launch; where its launcher is known well enough, encoded ones are
# kept by address and handed to the part of it that takes them.

_MAPS_LIMIT = 256


def _tensor_descriptor(tensor: Tensor, d: Descriptor) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = list(d.block)
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[tensor.dtype]
    if len(block) == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=dtype.primitive_bitwidth, rank=1)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, list(d.shape), list(d.strides), block, layout)


def _raw_launcher(compiled: Any) -> Any:
    """The launcher below the one that encodes descriptors (Triton 3.6), or None."""
    inner = getattr(compiled.run, "launch", None)
    closure = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)) if isfunction(inner) else {}
    if not triton.__version__.startswith("3.6.") or "launcher" not in closure:
        return None
    needs_scratch = compiled.run.global_scratch_size or compiled.run.profile_scratch_size
    return None if needs_scratch else closure["launcher"].cell_contents


def _encoders(compiled: Any, leading: dict[str, Any]) -> list[Callable[[int], tuple[Any, ...]] | None]:
    """For each leading parameter that is a descriptor, the function from an address to what the raw launcher takes."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    metadata = iter(compiled.metadata.tensordesc_meta)
    fill = triton.runtime.driver.active.utils.fill_tma_descriptor

    def encoder(descriptor: Any, meta: Any) -> Callable[[int], tuple[Any, ...]]:
        shape, strides = list(descriptor.shape), list(descriptor.strides)
        kind = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
        return lambda address: (fill(address, *kind, shape, strides, 0), *shape, *strides)

    return [encoder(value, next(metadata)) if hasattr(value, "block_shape") else None for value in leading.values()]


class _TensorMaps:
    """From addresses to a raw launcher's leading arguments, which are kept by all addresses together and by each."""

    def __init__(self, encoders: list[Callable[[int], tuple[Any, ...]] | None], indices: list[int]):
        self.slots: list[tuple[int, Any, dict[int, tuple[Any, ...]]]] = [
            (index, encoder, {}) for index, encoder in zip(indices, encoders, strict=True)
        ]
        self.known: dict[Sequence[int | None], list[Any]] = {}

    def __call__(self, addresses: Sequence[int | None]) -> list[Any]:
        flat = self.known.get(addresses)
        if flat is None:
            if len(self.known) >= _MAPS_LIMIT:
                self.known.clear()
            flat = self.known[addresses] = self._flat(addresses)
        return flat

    def _flat(self, addresses: Sequence[int | None]) -> list[Any]:
        flat: list[Any] = []
        for index, encoder, known in self.slots:
            address = addresses[index]
            if encoder is None:
                flat.append(address)
                continue
            assert address is not None
            arguments = known.get(address)
            if arguments is None:
                if len(known) >= _MAPS_LIMIT:
                    known.clear()
                arguments = known[address] = encoder(address)
            flat += arguments
        return flat


class _Descriptors:
    """From addresses to the leading arguments of Triton's own launcher, which encodes descriptors itself."""

    def __init__(self, leading: dict[str, Any], indices: list[int]):
        self.slots = [(index, value if hasattr(value, "block_shape") else None)
                      for index, value in zip(indices, leading.values(), strict=True)]  # fmt: skip

    def __call__(self, addresses: Sequence[int | None]) -> list[Any]:
        flat: list[Any] = []
        for index, descriptor in self.slots:
            if descriptor is None:
                flat.append(addresses[index])
            else:
                there = copy(descriptor)
                there.base = _Address(addresses[index])
                flat.append(there)
        return flat


class _Address:
    def __init__(self, address: int | None):
        self.address = address

    def data_ptr(self) -> int | None:
        return self.address


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
    return [(each, each.kernel[each.grid](*each.leading().values(), **each.args, **each.meta())) for each in launches]


def lower(launch: Launch, target: Target) -> Any:
    """Compile a launch for ``target`` without a GPU. Tensors may be on the meta device; their addresses count as
    aligned. Returns Triton's compiled kernel (``.asm``, ``.metadata``)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import mangle_type

    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for parameter, value in zip(launch.kernel.params, launch.bound(), strict=True):
        name, where, free = parameter.name, (parameter.num,), parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            signature[name], constexprs[where] = "constexpr", value
        elif hasattr(value, "block_shape"):
            signature[name] = mangle_type(value)
        elif isinstance(value, Tensor):
            signature[name] = _POINTER_TYPES[value.dtype]
            attributes[where] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[where] = [["tt.divisibility", 16]]
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    gpu = GPUTarget(target.kind, target.arch, 64 if str(target.arch).startswith("gfx9") else 32)
    return triton.compile(source, target=gpu, options=launch.meta())
