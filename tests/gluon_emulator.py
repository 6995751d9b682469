"""Runs Gluon kernels for Hopper on CPU tensors, which Triton's interpreter cannot: the part of the language that the
kernels of `fa3` use, and an error that names it for everything else.

    run(record)                           a ``launch.Launch`` of a Gluon kernel
    run(record, lazy=True, seed=3)        what is asynchronous happens as late as it may, and turns are random

A kernel is a Python function. It runs as it is, with other globals: those of this file instead of Gluon's, and likewise
for every function that it calls. A block of values is a torch tensor of the same shape; layouts mean nothing.
gluon_machine.py has what runs beside a program, and explains ``lazy`` and ``seed``.
"""

from __future__ import annotations

import linecache
import math
import re
import sys
from types import FunctionType, SimpleNamespace
from typing import Any

import gluon_machine as machine
import numpy as np
import torch
import triton.language as tl
from gluon_machine import Deadlock, InFlight, Machine, Program, Task, here, poison
from gluon_values import Block, Int, plain, value_of
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from speedlight.backends.fa3 import versions

__all__ = ["Deadlock", "run"]

# Global memory.


class Pointer:
    """An address, or a block of addresses, in the memory of one tensor."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        offset = plain(offset)
        if isinstance(self.offset, Tensor) and isinstance(offset, Tensor) and self.offset.dim() != offset.dim():
            raise TypeError(f"offsets of shape {list(offset.shape)} to addresses of shape {list(self.offset.shape)}")
        return Pointer(self.memory, self.offset + offset)

    __radd__ = __add__

    def to(self, dtype):
        if dtype != torch.int64:
            raise NotImplementedError(f"an address as {dtype} has no emulation")
        return self

    def places(self, mask=None):
        """Indices into memory, and which of them count."""
        at = torch.as_tensor(self.offset, dtype=torch.int64)
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(True if mask is None else plain(mask)))
        outside = mask & ((at < 0) | (at >= len(self.memory)))
        if outside.any():
            raise IndexError(f"address {at[outside][0]} in a tensor of {len(self.memory)} values")
        return at, mask


def _load(pointer, mask=None, other=None):
    at, mask = pointer.places(mask)
    values = pointer.memory[torch.where(mask, at, 0)]
    return value_of(torch.where(mask, values, poison(values.dtype) if other is None else plain(other)))


def _store(pointer, value, mask=None):
    at, mask = pointer.places(mask)
    pointer.memory[at[mask]] = torch.as_tensor(plain(value)).to(pointer.memory.dtype).broadcast_to(at.shape)[mask]


def _atomic_add(pointer, value, sem):
    before = _load(pointer)
    _store(pointer, before + value)
    here().give_way()
    return before


# Assembly.


def _add_by_fours(pointer, values):
    """Each thread gives four values, of two rows, in one instruction, to the address of the first."""
    at, _ = pointer.places()
    first = at.reshape(-1, 2, 8, at.shape[1] // 2, 2)[:, :1, :, :, :1]
    fours = first + torch.tensor([0, 2]).reshape(2, 1, 1, 1) + torch.tensor([0, 1])
    if (first % 4).any() or not torch.equal(fours.reshape(at.shape), at):
        raise RuntimeError("the four values of a thread do not go to one place")
    pointer.memory.index_add_(0, at.flatten(), plain(values).flatten())


def _packed(dtype):
    return lambda even, odd: Block(torch.stack(plain(even, odd), -1).to(dtype).view(torch.int32)[..., 0])


_ASSEMBLY = {
    "mov.b32 $0, $1;": lambda x: x,
    "lg2.approx.ftz.f32 $0, $1;": lambda x: Block(torch.log2(plain(x))),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": _packed(torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": _packed(torch.float16),
    "cp.async.bulk.wait_group 0; mov.b32 $0, $1;": lambda zero: machine.await_writes(),
    "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;":
        _add_by_fours,
}  # fmt: skip


def _inline_asm(code, constraints, args, dtype, is_pure, pack):
    if found := re.fullmatch(r"bar\.(sync|arrive) \$1, (\d+); mov\.b32 \$0, \$1;", code):
        return machine.hardware_barrier(found[1], args[0], int(found[2]))
    if code not in _ASSEMBLY:
        raise NotImplementedError(f"assembly {code!r} has no emulation")
    return _ASSEMBLY[code](*args)


# The language.


class _Namespace:
    """A module. What is not in it is not emulated."""

    def __init__(self, name, **known):
        self.__dict__.update(known, _name=name)

    def __getattr__(self, name):
        raise NotImplementedError(f"{self._name}.{name} has no emulation")


def _missing(name):
    def call(*_arguments, **_named):
        raise NotImplementedError(f"{name} has no emulation")

    return call


def _no_layout(*_arguments, **_named):
    return None


def _of_two(of_numbers, of_tensors):
    def compute(a, b):
        if isinstance(a, Block) or isinstance(b, Block):
            return Block(of_tensors(*map(torch.as_tensor, plain(a, b))))
        return of_numbers(a, b)

    return compute


def _where(condition, a, b):
    return Block(torch.where(*plain(condition, a, b))) if isinstance(condition, Block) else (a if condition else b)


def _largest(block, axis):
    data = plain(block)
    if data.dtype.is_floating_point:
        data = data.nan_to_num(-math.inf, math.inf, -math.inf)  # of a number and NaN it is the number
    return value_of(data.amax(axis))


def _allocate(dtype, shape, layout):
    caller = sys._getframe(1)
    name = linecache.getline(caller.f_code.co_filename, caller.f_lineno).partition("=")[0].strip()
    return machine.allocate(dtype, shape, name)


def _wait_for_products(num_outstanding=0, deps=()):
    machine.complete_products(num_outstanding)
    in_flight = here().products
    values = [Block(x.result) if isinstance(x, InFlight) and x not in in_flight else x for x in deps]
    return values[0] if len(values) == 1 else tuple(values)


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs):
    task = here()
    threads = [task.threads, *(32 * warps for warps in worker_num_warps)]
    partitions = [
        task.program.machine.start(Task(f"{task.name} partition {n}", task.program, count), function, arguments)
        for n, ((function, arguments), count) in enumerate(zip(functions_and_args, threads, strict=True))
    ]
    task.give_way(lambda: all(partition.done for partition in partitions), lambda: "its partitions")


_LAYOUTS = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "DistributedLinearLayout",
            "SwizzledSharedLayout")  # fmt: skip
_DTYPES = ("float16", "bfloat16", "float32", "int16", "int32", "int64")

_language = _Namespace(
    "gl",
    **dict.fromkeys(_LAYOUTS, _no_layout),
    NVMMASharedLayout=SimpleNamespace(get_default_for=_no_layout),
    **{name: getattr(torch, name) for name in _DTYPES},
    static_range=range,
    program_id=lambda axis: Int(here().program.number),
    num_programs=lambda axis: Int(here().program.count),
    to_tensor=Int,
    cdiv=lambda a, b: (a + (b - 1)) // b,
    minimum=_of_two(min, torch.fmin),
    maximum=_of_two(max, torch.fmax),
    where=_where,
    abs=lambda x: Block(plain(x).abs()),
    exp2=lambda x: Block(torch.exp2(plain(x))),
    max=_largest,
    sum=lambda x, axis: value_of(plain(x).sum(axis)),
    zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype)),
    zeros_like=lambda x: Block(torch.zeros_like(plain(x))),
    full=lambda shape, value, dtype, layout: Block(torch.full(shape, plain(value), dtype=dtype)),
    arange=lambda start, end, layout: Block(torch.arange(start, end, dtype=torch.int32)),
    convert_layout=lambda x, layout, assert_trivial=False: Block(plain(x)),
    expand_dims=lambda x, axis: Block(plain(x).unsqueeze(axis)),
    reshape=lambda x, shape: Block(plain(x).reshape(shape)),
    permute=lambda x, order: Block(plain(x).permute(order)),
    join=lambda a, b: Block(torch.stack(plain(a, b), -1)),
    split=lambda x: tuple(map(Block, plain(x).unbind(-1))),
    broadcast=lambda a, b: tuple(map(Block, torch.broadcast_tensors(*plain(a, b)))),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    allocate_shared_memory=_allocate,
    inline_asm_elementwise=_inline_asm,
    warp_specialize=_warp_specialize,
)
_mbarrier = _Namespace(
    "mbarrier", init=machine.mbarrier_init, arrive=machine.mbarrier_arrive, expect=machine.mbarrier_expect,
    wait=machine.mbarrier_wait, MBarrierLayout=_no_layout,
)  # fmt: skip
_REPLACEMENTS = [
    (gl, _language),
    (tl, _language),
    (hopper.mbarrier, _mbarrier),
    (hopper.tma, _Namespace("tma", store_wait=machine.store_wait)),
    (hopper.fence_async_shared, machine.fence_async_shared),
    (hopper.warpgroup_mma, machine.warpgroup_mma),
    (hopper.warpgroup_mma_wait, _wait_for_products),
    (versions.tma_load, machine.tma_load),
    (versions.tma_store, machine.tma_store),
    (versions.tma_add, machine.tma_add),
    (versions.reinterpret, machine.reinterpret),
]
_replacements = {id(real): emulated for real, emulated in _REPLACEMENTS}


class _Rehosted:
    """For each module the globals that its kernels get."""

    def __init__(self):
        self.modules = {}

    def function(self, original):
        code, home = original.__code__, original.__globals__
        if home["__name__"] not in self.modules:
            self.modules[home["__name__"]] = found = {}
            found.update((name, self._emulated(name, value)) for name, value in home.items())
        return FunctionType(code, self.modules[home["__name__"]], code.co_name, original.__defaults__)

    def _emulated(self, name, value):
        if id(value) in _replacements:
            return _replacements[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(getattr(value, "fn", None), FunctionType):
            return self.function(value.fn)
        return _missing(name) if getattr(value, "__triton_builtin__", False) else value


def run(record: Any, *, lazy: bool = False, seed: int | None = None, together: bool = False, timeout: float = 120):
    """Execute a ``launch.Launch`` of a Gluon kernel. Its programs run one after the other, or ``together``.

    Raises:
        Deadlock: all partitions wait; the message says for what.
        NotImplementedError: the kernel uses something that has no emulation here.
    """
    values: list[Any] = []
    for name in record.tensor_names():
        tensor, descriptor = record.tensors.get(name), record.descriptors.get(name)
        if descriptor is not None:
            values.append(machine.TensorMap(record.tensors[descriptor.tensor], descriptor))
        else:
            values.append(None if tensor is None else Pointer(tensor.view(-1)))
    for parameter in record.kernel.params[len(values) :]:
        value = record.args[parameter.name]
        if not parameter.is_constexpr:
            value = np.float32(value) if isinstance(value, float) else Int(value)
        values.append(value)
    kernel = _Rehosted().function(record.kernel.fn)
    count = math.prod(record.grid)
    for numbers in [range(count)] if together else [[n] for n in range(count)]:
        ours = Machine(lazy, seed)
        for number in numbers:
            program = Program(number, count, ours)
            ours.start(Task(f"program {number}", program, 32 * record.num_warps), _execute, (program, kernel, values))
        ours.go(timeout)


def _execute(program, kernel, values):
    kernel(*values)
    program.check_end()
