"""Runs Gluon kernels for Hopper on CPU tensors, which Triton's interpreter cannot: the part of the language that the
kernels of `fa3` use, and an error that names it for everything else.

    run(record)                           a ``launch.Launch`` of a Gluon kernel
    run(record, lazy=True, seed=3)        what is asynchronous happens as late as it may, and turns are random

A kernel is a Python function. It runs as it is, with other globals: those of this file instead of Gluon's, and
likewise for every function that it calls. A block of values is a torch tensor of the same shape; layouts mean nothing.

Each partition of a program has a thread, of which one runs at a time. It runs until it has to wait, or with ``seed``
until some operation that others can notice. If all wait, that is an error which says for what. Barriers are those of
the hardware: an mbarrier's phase ends when all have arrived and all bytes are there, bar.sync counts threads.

With ``lazy`` a matrix product reads its operands when it is waited for, a store by TMA reads shared memory when that
is waited for, and writes in any order unless that is, and a load by TMA spoils its destination at once and
fills it when nothing else can go on (or, with ``seed``, some time before). So what is overwritten, handed on or read too
early comes out wrong. Shared memory starts as NaN. Not checked: layouts, fences, and how long anything takes.
"""

from __future__ import annotations

import math
import operator
import random
import re
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from speedlight.backends.fa3 import versions

# Who runs.


class Deadlock(RuntimeError):
    pass


class _Stop(BaseException):
    """Ends a partition because another one failed."""


class _Task:
    """A partition, or a program before it has any."""

    def __init__(self, name, program, threads):
        self.name, self.program, self.threads = name, program, threads
        self.turn = threading.Semaphore(0)
        self.ready, self.waits_for, self.done = None, "", False
        self.products = []  # matrix products in flight, the oldest first
        self.unread, self.unwritten = [], []  # stores by TMA that have yet to read shared memory; or only to write

    def finish(self):
        if self.products or self.unread:
            kind = "a matrix product" if self.products else "a store from shared memory"
            raise RuntimeError(f"{self.name} ends with {kind} in flight")
        self.write()

    def read(self, left):
        while len(self.unread) > left:
            descriptor, where, source, add = self.unread.pop(0)
            self.unwritten.append((descriptor, where, source.data.clone(), add))

    def write(self):
        while self.unwritten:  # the newest first: the hardware may
            _store_window(*self.unwritten.pop())


class _Program:
    def __init__(self, number, count, machine):
        self.number, self.count, self.machine = number, count, machine
        self.memory, self.barriers, self.hardware_barriers = [], {}, {}


class _Machine:
    def __init__(self, lazy, seed):
        self.lazy, self.random = lazy, None if seed is None else random.Random(seed)
        self.tasks, self.loads = [], []  # loads by TMA that have yet to arrive
        self.error, self.ended = None, threading.Event()

    def start(self, task, function, *arguments):
        self.tasks.append(task)
        threading.Thread(target=self._run, args=(task, function, arguments), daemon=True).start()
        return task

    def go(self, timeout):
        self._pass_on()
        if not self.ended.wait(timeout):
            self._fail(TimeoutError(f"no end after {timeout} seconds: {self._waiting()}"))
        if self.error is not None:
            raise self.error

    def give_way(self, ready=None, waits_for=""):
        """Let others run, and go on when ready."""
        if self.random is None and (ready is None or ready()):
            return
        task = _here.task
        task.ready, task.waits_for = ready, waits_for
        self._pass_on()
        task.turn.acquire()
        if self.error is not None:
            raise _Stop
        task.ready = None

    def _run(self, task, function, arguments):
        task.turn.acquire()
        _here.task = task
        try:
            if self.error is None:
                function(*arguments)
                task.finish()
                task.done = True
                self.tasks.remove(task)
                self._pass_on()
        except _Stop:
            pass
        except BaseException as error:
            self._fail(error)

    def _pass_on(self):
        able = []
        while not able and self.tasks:
            able = [task for task in self.tasks if task.ready is None or task.ready()]
            if self.loads and (not able or (self.random is not None and self.random.random() < 0.2)):
                self.loads.pop(0 if self.random is None else self.random.randrange(len(self.loads)))()
            elif not able:
                self._fail(Deadlock(f"all wait: {self._waiting()}"))
                return
        if able:
            (able[0] if self.random is None else self.random.choice(able)).turn.release()
        else:
            self.ended.set()

    def _waiting(self):
        return "; ".join(f"{task.name} for {task.waits_for or 'nothing'}" for task in self.tasks)

    def _fail(self, error):
        self.error = self.error or error
        for task in self.tasks:
            task.turn.release()
        self.ended.set()


_here = threading.local()  # .task


# Values. Scalars are Int, np.float32, bool, or plain numbers where the kernel has written them.


def _truncated(a, b):
    """a // b as in C."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


class Int(int):
    def to(self, dtype):
        return self


def _of_ints(compute):
    def method(a, b):
        return Int(compute(int(a), int(b))) if isinstance(b, int) else NotImplemented

    return method


class Block:
    """Values in registers."""

    __array_ufunc__ = None  # numpy's scalars leave arithmetic to this class

    def __init__(self, data):
        self.data = data
        self.dtype, self.shape, self.type = data.dtype, list(data.shape), SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __invert__(self):
        return Block(~self.data)

    def __neg__(self):
        return Block(-self.data)


def _plain(x):
    """The torch tensor or Python number behind a value."""
    if isinstance(x, InFlight):
        raise RuntimeError("an accumulator is read while its product is in flight")
    return x.data if isinstance(x, Block) else float(x) if isinstance(x, np.floating) else x


def _together(*values):
    ranks = {x.data.dim() for x in values if isinstance(x, Block)}
    if len(ranks) > 1:
        raise TypeError(f"blocks of shapes {[x.shape for x in values if isinstance(x, Block)]} in one operation")
    return map(_plain, values)


def _of_blocks(compute):
    def method(a, b):
        return Block(compute(*_together(a, b))) if isinstance(b, Block | int | float | np.floating) else NotImplemented

    return method


_OPERATORS = dict.fromkeys(
    ("add", "sub", "mul", "truediv", "and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"), None
) | {
    "floordiv": (_truncated, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "mod": (lambda a, b: a - b * _truncated(a, b), torch.fmod),
}  # fmt: skip
for _name, _own in _OPERATORS.items():
    _of_int, _of_block = _own or (getattr(operator, _name),) * 2
    _name = _name.strip("_")
    _compares = _name in ("lt", "le", "gt", "ge", "eq", "ne")
    for _class, _wrap, _compute in ((Int, _of_ints, _of_int), (Block, _of_blocks, _of_block)):
        if _class is Block or not (_compares or _name == "truediv"):
            setattr(_class, f"__{_name}__", _wrap(_compute))
            if not _compares:
                setattr(_class, f"__r{_name}__", _wrap(lambda a, b, _compute=_compute: _compute(b, a)))


class Pointer:
    """An address, or a block of addresses, in the memory of one tensor."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        a, b = self.offset, _plain(offset)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() != b.dim():
            raise TypeError(f"addresses of shape {list(a.shape)} and offsets of shape {list(b.shape)}")
        return Pointer(self.memory, a + b)

    __radd__ = __add__

    def to(self, dtype):
        if dtype != torch.int64:
            raise NotImplementedError(f"an address as {dtype}")
        return self

    def places(self, mask):
        """Indices into memory, and which of them count."""
        at = torch.as_tensor(self.offset, dtype=torch.int64)
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(True if mask is None else _plain(mask)))
        outside = mask & ((at < 0) | (at >= len(self.memory)))
        if outside.any():
            raise IndexError(f"address {at[outside][0]} in a tensor of {len(self.memory)} values")
        return at, mask


def _value(data):
    """What a kernel gets: a number if there are no axes."""
    if data.dim():
        return Block(data)
    return Int(data) if not data.dtype.is_floating_point else np.float32(data)


class Shared:
    """A view of shared memory."""

    def __init__(self, data, buffer):
        self.data, self.buffer = data, buffer
        self.dtype, self.shape, self.type = data.dtype, list(data.shape), SimpleNamespace(layout=None)

    def index(self, i):
        if not 0 <= i < self.shape[0]:
            raise IndexError(f"index {i} in shared memory of shape {self.shape}")
        return Shared(self.data[i], self.buffer)

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length), self.buffer)

    def reshape(self, shape):
        return Shared(self.data.view(shape), self.buffer)

    def permute(self, order):
        return Shared(self.data.permute(order), self.buffer)

    def load(self, layout):
        return Block(self.data.clone())

    def store(self, value):
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(f"a block {value.shape} of {value.dtype} to shared memory {self.shape} of {self.dtype}")
        self.data.copy_(value.data)


def _poison(dtype):
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def reinterpret(block, dtype, shape, layout):
    values = math.prod(shape)
    return Shared(block.buffer[: values * dtype.itemsize].view(dtype).view(shape), block.buffer)


# TMA.


class TensorMap:
    def __init__(self, tensor, descriptor):
        self.shape, self.block, self.dtype, self.layout = descriptor.shape, list(descriptor.block), tensor.dtype, None
        self.block_type = SimpleNamespace(nbytes=math.prod(self.block) * tensor.dtype.itemsize)
        steps = [stride * tensor.dtype.itemsize for stride in descriptor.strides[:-1]]
        assert descriptor.strides[-1] == 1 and not any(step % 16 for step in (*steps, tensor.data_ptr())), descriptor
        self.memory = tensor.as_strided(descriptor.shape, descriptor.strides)

    def window(self, where):
        """The part of a block that is inside the tensor, and where it is in the block."""
        if len(where) != len(self.block):
            raise TypeError(f"coordinates {where} for a block {self.block}")
        ends = [(max(c, 0), max(min(c + b, n), 0)) for c, b, n in zip(where, self.block, self.shape, strict=True)]
        inner = tuple(slice(max(lo - c, 0), max(hi - c, 0)) for (lo, hi), c in zip(ends, where, strict=True))
        return self.memory[tuple(slice(lo, max(lo, hi)) for lo, hi in ends)], inner


def _check_block(descriptor, shared):
    if shared.shape != descriptor.block or shared.dtype != descriptor.dtype:
        raise TypeError(
            f"{descriptor.block} of {descriptor.dtype} and {shared.shape} of {shared.dtype} in shared memory"
        )


def tma_load(descriptor, where, barrier, destination):
    _check_block(descriptor, destination)
    state, machine, where = _mbarrier(barrier), _here.task.program.machine, list(map(int, where))

    def arrive():
        values, inner = descriptor.window(where)
        destination.data.zero_()[inner] = values
        state.change(data=-descriptor.block_type.nbytes)

    if machine.lazy:
        destination.data.fill_(_poison(destination.dtype))
        machine.loads.append(arrive)
        machine.give_way()
    else:
        arrive()


def tma_store(descriptor, where, source, add=False):
    _check_block(descriptor, source)
    task = _here.task
    task.unread.append((descriptor, list(map(int, where)), source, add))
    if not task.program.machine.lazy:
        task.read(0)
        task.write()
    task.program.machine.give_way()


def tma_add(descriptor, where, source):
    tma_store(descriptor, where, source, add=True)


def _store_window(descriptor, where, values, add):
    there, inner = descriptor.window(where)
    there.add_(values[inner]) if add else there.copy_(values[inner])


def store_wait(pendings):
    _here.task.read(pendings)
    _here.task.program.machine.give_way()


# Barriers.


class _Mbarrier:
    def __init__(self, count):
        self.count = self.arrivals = count
        self.data = self.phases = 0

    def change(self, arrivals=0, data=0):
        self.arrivals, self.data = self.arrivals - arrivals, self.data + data
        if self.arrivals < 0:
            raise RuntimeError("more arrivals at an mbarrier than it counts")
        if self.arrivals == 0 and self.data == 0:
            self.arrivals, self.phases = self.count, self.phases + 1


def _mbarrier(shared):
    barriers, address = _here.task.program.barriers, shared.data.data_ptr()
    if shared.data.numel() != 1 or address not in barriers:
        raise RuntimeError("an mbarrier that is used before mbarrier.init")
    return barriers[address]


def _init(shared, count):
    _here.task.program.barriers[shared.data.data_ptr()] = _Mbarrier(count)


def _arrive(shared, count=1):
    _mbarrier(shared).change(arrivals=count)
    _here.task.program.machine.give_way()


def _expect(shared, size):
    _mbarrier(shared).change(arrivals=1, data=int(size))


def _wait(shared, phase, pred=True):
    """Until the phase of this parity has ended; of the phases before the first, the odd one has."""
    if pred:
        state = _mbarrier(shared)
        names = f"phase {int(phase)} of mbarrier ({state.phases} ended, {state.arrivals} to arrive, {state.data} bytes)"
        _here.task.program.machine.give_way(lambda: state.phases & 1 != phase, names)


def _hardware_barrier(kind, number, count):
    task = _here.task
    state = task.program.hardware_barriers.setdefault(int(number), SimpleNamespace(here={}, count=count, times=0))
    if (state.count != count and state.here) or task in state.here:
        raise RuntimeError(f"{task.name} comes to hardware barrier {number} for {count} twice, or others for another")
    state.count, times = count, state.times
    state.here[task] = task.threads
    here = sum(state.here.values())
    if here > count:
        raise RuntimeError(f"{here} threads at hardware barrier {number} for {count}")
    if here == count:
        state.here, state.times = {}, times + 1
    ready = (lambda: state.times > times) if kind == "sync" else None
    task.program.machine.give_way(ready, f"hardware barrier {number} ({here} of {count} threads there)")


# Matrix products.


class InFlight:
    """An accumulator that a product is to be added to."""

    def __init__(self, a, b, accumulator):
        self.operands, self.accumulator, self.result = (a, b), accumulator, None
        self.shape = [a.shape[0], b.shape[1]]

    def compute(self):
        if self.result is None:
            a, b = (x.data.float() for x in self.operands)
            start = self.accumulator.result if isinstance(self.accumulator, InFlight) else _plain(self.accumulator)
            self.result = torch.addmm(start, a, b)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    if not is_async:
        raise NotImplementedError("warpgroup_mma without is_async")
    if a.dtype != b.dtype or a.dtype.itemsize != 2 or acc.shape != [a.shape[0], b.shape[1]] or a.shape[1] != b.shape[0]:
        raise TypeError(f"product of {a.shape} {a.dtype} and {b.shape} {b.dtype} to {acc.shape}")
    product, task = InFlight(a, b, acc if use_acc else Block(torch.zeros(acc.shape))), _here.task
    task.products.append(product)
    if not task.program.machine.lazy:
        product.compute()
    task.program.machine.give_way()
    return product


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    task = _here.task
    done = task.products[: max(len(task.products) - num_outstanding, 0)]
    del task.products[: len(done)]
    for product in done:
        product.compute()
    task.program.machine.give_way()
    values = [Block(x.result) if isinstance(x, InFlight) and x not in task.products else x for x in deps]
    return values[0] if len(values) == 1 else tuple(values)


# The language.


class _Namespace:
    """What is not here is not emulated."""

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


def _pairwise(of_numbers, of_tensors):
    def compute(a, b):
        if isinstance(a, Block) or isinstance(b, Block):
            return Block(of_tensors(*map(torch.as_tensor, _together(a, b))))
        return type(a)(of_numbers(a, b)) if isinstance(a, Int) else of_numbers(a, b)

    return compute


def _where(condition, a, b):
    return Block(torch.where(*_together(condition, a, b))) if isinstance(condition, Block) else (a if condition else b)


def _maximum_of(block, axis):
    data = _plain(block)
    if data.dtype.is_floating_point:
        data = data.nan_to_num(-math.inf, math.inf, -math.inf)  # the hardware's maximum takes the number
    return _value(data.amax(axis))


def _load(pointer, mask=None, other=None):
    at, mask = pointer.places(mask)
    values = pointer.memory[torch.where(mask, at, 0)]
    return _value(torch.where(mask, values, _poison(values.dtype) if other is None else _plain(other)))


def _store(pointer, value, mask=None):
    at, mask = pointer.places(mask)
    pointer.memory[at[mask]] = torch.as_tensor(_plain(value)).to(pointer.memory.dtype).broadcast_to(at.shape)[mask]


def _atomic_add(pointer, value, sem):
    before = _load(pointer)
    _store(pointer, before + value)
    _here.task.program.machine.give_way()
    return before


def _allocate_shared_memory(dtype, shape, layout):
    buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    _here.task.program.memory.append(buffer)  # addresses are names
    return Shared(buffer.view(dtype).fill_(_poison(dtype)).view(shape), buffer)


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs):
    task = _here.task
    program, machine = task.program, task.program.machine
    warps = [task.threads // 32, *worker_num_warps]
    partitions = [
        machine.start(_Task(f"{task.name} partition {n}", program, 32 * warp), function, *arguments)
        for n, ((function, arguments), warp) in enumerate(zip(functions_and_args, warps, strict=True))
    ]
    task.ready = lambda: all(partition.done for partition in partitions)
    machine.give_way(task.ready, "its partitions")


def _add_by_fours(pointer, values):
    """Each thread gives four values, of two rows, in one instruction, to the address of the first."""
    at, _ = pointer.places(None)
    first = at.reshape(-1, 2, 8, at.shape[1] // 2, 2)[:, :1, :, :, :1]
    fours = first + torch.tensor([0, 2]).reshape(2, 1, 1, 1) + torch.tensor([0, 1])
    if (first % 4).any() or not torch.equal(fours.reshape(at.shape), at):
        raise RuntimeError("four values of a thread are not in one place")
    pointer.memory.index_add_(0, at.flatten(), _plain(values).flatten())


def _packed(dtype):
    return lambda even, odd: Block(torch.stack([_plain(even), _plain(odd)], -1).to(dtype).view(torch.int32)[..., 0])


def _await_writes(zero):
    _here.task.read(0)
    _here.task.write()


_ASSEMBLY = {
    "mov.b32 $0, $1;": lambda x: x,
    "lg2.approx.ftz.f32 $0, $1;": lambda x: Block(torch.log2(_plain(x))),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": _packed(torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": _packed(torch.float16),
    "cp.async.bulk.wait_group 0; mov.b32 $0, $1;": _await_writes,
    "red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;": (
        _add_by_fours
    ),
}  # fmt: skip


def _inline_asm(code, constraints, args, dtype, is_pure, pack):
    if found := re.fullmatch(r"bar\.(sync|arrive) \$1, (\d+); mov\.b32 \$0, \$1;", code):
        return _hardware_barrier(found[1], args[0], int(found[2]))
    if code not in _ASSEMBLY:
        raise NotImplementedError(f"assembly {code!r} has no emulation")
    return _ASSEMBLY[code](*args)


_LAYOUTS = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "DistributedLinearLayout",
            "SwizzledSharedLayout")  # fmt: skip
_DTYPES = ("float16", "bfloat16", "float32", "int16", "int32", "int64")

_language = _Namespace(
    "gl",
    **dict.fromkeys(_LAYOUTS, _no_layout),
    NVMMASharedLayout=SimpleNamespace(get_default_for=_no_layout),
    **{name: getattr(torch, name) for name in _DTYPES},
    static_range=range,
    program_id=lambda axis: Int(_here.task.program.number),
    num_programs=lambda axis: Int(_here.task.program.count),
    to_tensor=lambda x: Int(x),
    cdiv=lambda a, b: (a + (b - 1)) // b,
    minimum=_pairwise(min, torch.fmin),
    maximum=_pairwise(max, torch.fmax),
    where=_where,
    abs=lambda x: Block(_plain(x).abs()),
    exp2=lambda x: Block(torch.exp2(_plain(x))),
    max=_maximum_of,
    sum=lambda x, axis: _value(_plain(x).sum(axis)),
    zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype)),
    zeros_like=lambda x: Block(torch.zeros_like(_plain(x))),
    full=lambda shape, value, dtype, layout: Block(torch.full(shape, _plain(value), dtype=dtype)),
    arange=lambda start, end, layout: Block(torch.arange(start, end, dtype=torch.int32)),
    convert_layout=lambda x, layout, assert_trivial=False: Block(_plain(x)),
    expand_dims=lambda x, axis: Block(_plain(x).unsqueeze(axis)),
    reshape=lambda x, shape: Block(_plain(x).reshape(shape)),
    permute=lambda x, order: Block(_plain(x).permute(order)),
    join=lambda a, b: Block(torch.stack([_plain(a), _plain(b)], -1)),
    split=lambda x: tuple(map(Block, _plain(x).unbind(-1))),
    broadcast=lambda a, b: tuple(map(Block, torch.broadcast_tensors(*_together(a, b)))),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    allocate_shared_memory=_allocate_shared_memory,
    inline_asm_elementwise=_inline_asm,
    warp_specialize=_warp_specialize,
)
_REPLACEMENTS = [
    (gl, _language),
    (tl, _language),
    (hopper.mbarrier, _Namespace(
        "mbarrier", init=_init, arrive=_arrive, expect=_expect, wait=_wait, MBarrierLayout=_no_layout
    )),
    (hopper.tma, _Namespace("tma", store_wait=store_wait)),
    (hopper.fence_async_shared, lambda: None),
    (hopper.warpgroup_mma, warpgroup_mma),
    (hopper.warpgroup_mma_wait, warpgroup_mma_wait),
    (versions.tma_load, tma_load),
    (versions.tma_store, tma_store),
    (versions.tma_add, tma_add),
    (versions.reinterpret, reinterpret),
]  # fmt: skip
_replacements = {id(real): emulated for real, emulated in _REPLACEMENTS}


class _Globals:
    """For each module the globals that its kernels get."""

    def __init__(self):
        self.modules = {}

    def rehosted(self, function):
        code = function.__code__
        return FunctionType(code, self.of(function.__globals__), code.co_name, function.__defaults__)

    def of(self, module):
        if module["__name__"] not in self.modules:
            self.modules[module["__name__"]] = found = {}
            found.update((name, self._emulated(name, value)) for name, value in module.items())
        return self.modules[module["__name__"]]

    def _emulated(self, name, value):
        if id(value) in _replacements:
            return _replacements[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(getattr(value, "fn", None), FunctionType):
            return self.rehosted(value.fn)
        if getattr(value, "__triton_builtin__", False):
            return _missing(name)
        return value


def run(record: Any, *, lazy: bool = False, seed: int | None = None, together: bool = False, timeout: float = 120):
    """Execute a ``launch.Launch`` of a Gluon kernel. Its programs run one after the other, or all together.

    Raises:
        Deadlock: all partitions wait; the message says for what.
        NotImplementedError: the kernel uses something that has no emulation here.
    """
    values = []
    for name in record.tensor_names():
        tensor, descriptor = record.tensors.get(name), record.descriptors.get(name)
        if descriptor is not None:
            values.append(TensorMap(record.tensors[descriptor.tensor], descriptor))
        else:
            values.append(None if tensor is None else Pointer(tensor.view(-1)))
    for parameter in record.kernel.params[len(values) :]:
        value = record.args[parameter.name]
        if not parameter.is_constexpr:
            value = np.float32(value) if isinstance(value, float) else Int(value)
        values.append(value)
    kernel = _Globals().rehosted(record.kernel.fn)
    count = math.prod(record.grid)
    for numbers in [range(count)] if together else [[n] for n in range(count)]:
        machine = _Machine(lazy, seed)
        for number in numbers:
            program = _Program(number, count, machine)
            machine.start(_Task(f"program {number}", program, 32 * record.num_warps), _program, program, kernel, values)
        machine.go(timeout)


def _program(program, kernel, values):
    kernel(*values)
    for number, state in program.hardware_barriers.items():
        if state.here:
            raise RuntimeError(f"hardware barrier {number} is left with {sum(state.here.values())} of {state.count}")
