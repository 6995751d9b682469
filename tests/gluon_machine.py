"""What a program of the Gluon emulator (gluon_emulator.py) runs on: partitions that take turns, shared memory, and what
works beside them: barriers, TMA and matrix products.

Each partition has a thread, of which one runs at a time: until it has to wait, or with ``seed`` until some operation
that others can notice. If all wait, that is an error which says for what.

With ``lazy`` a matrix product reads its operands when it is waited for; a store by TMA reads shared memory when that is
waited for, and writes at the end unless that is; a load by TMA spoils its destination at once and fills it when nothing
else can go on, or with ``seed`` some time before. So what is overwritten, handed on or read too early comes out wrong.
"""

from __future__ import annotations

import math
import random
import threading
from types import SimpleNamespace

import torch
from gluon_values import Block


class Deadlock(RuntimeError):
    """All partitions wait."""


class _Stop(BaseException):
    """Ends a partition because another one failed."""


_local = threading.local()


def here() -> Task:
    """The partition that runs."""
    return _local.task


class Task:
    """A partition, or a program before it has any."""

    def __init__(self, name, program, threads):
        self.name, self.program, self.threads = name, program, threads
        self.turn, self.done = threading.Semaphore(0), False
        self.ready, self.waits_for = None, lambda: "its turn"
        self.products = []  # matrix products in flight, the oldest first
        self.unread, self.unwritten = (
            [],
            [],
        )  # stores by TMA that have yet to read shared memory; that have only to write
        self.unfenced = set()  # what it has written to shared memory since its last fence, as (first, last) address

    def give_way(self, ready=None, waits_for=None):
        """Let others run, and go on when ready."""
        machine = self.program.machine
        if machine.error is None and machine.random is None and (ready is None or ready()):
            return
        self.ready, self.waits_for = ready, waits_for
        machine.pass_on()
        self.turn.acquire()
        if machine.error is not None:
            raise _Stop
        self.ready = None

    def read(self, left=0):
        """Let stores read shared memory, all but the last ones."""
        while len(self.unread) > left:
            descriptor, where, source, add = self.unread.pop(0)
            self.unwritten.append((descriptor, where, source.data.clone(), add))

    def write(self):
        while self.unwritten:  # the newest first: there is no order
            descriptor, where, values, add = self.unwritten.pop()
            there, inner = descriptor.window(where)
            there.add_(values[inner]) if add else there.copy_(values[inner])

    def finish(self):
        if self.products or self.unread:
            kind = "a matrix product" if self.products else "a store from shared memory"
            raise RuntimeError(f"{self.name} ends with {kind} in flight")
        self.write()


class Machine:
    """Runs the tasks of one program, or of several."""

    def __init__(self, lazy, seed):
        self.lazy, self.random = lazy, None if seed is None else random.Random(seed)
        self.tasks, self.loads = [], []  # loads by TMA that have yet to arrive, as (destination, what then happens)
        self.error, self.ended = None, threading.Event()

    def start(self, task, function, arguments):
        self.tasks.append(task)
        threading.Thread(target=self._run, args=(task, function, arguments), daemon=True).start()
        return task

    def go(self, timeout):
        """Run all tasks to their ends, and raise what one of them raises."""
        self.pass_on()
        if not self.ended.wait(timeout):
            self._fail(TimeoutError(f"no end after {timeout} seconds; {self._waiting()}"))
        if self.error is not None:
            raise self.error

    def pass_on(self):
        able = []
        while not able and self.tasks:
            able = [task for task in self.tasks if task.ready is None or task.ready()]
            if self.loads and (not able or (self.random is not None and self.random.random() < 0.2)):
                self.loads.pop(0 if self.random is None else self.random.randrange(len(self.loads)))[1]()
            elif not able:
                return self._fail(Deadlock(self._waiting()))
        if not able:
            return self.ended.set()
        return (able[0] if self.random is None else self.random.choice(able)).turn.release()

    def _run(self, task, function, arguments):
        task.turn.acquire()
        _local.task = task
        try:
            if self.error is None:
                function(*arguments)
                task.finish()
                task.done = True
                self.tasks.remove(task)
                self.pass_on()
        except _Stop:
            pass
        except BaseException as error:
            self._fail(error)

    def _waiting(self):
        return "; ".join(f"{task.name} waits for {task.waits_for()}" for task in self.tasks)

    def _fail(self, error):
        self.error = self.error or error
        for task in self.tasks:
            task.turn.release()
        self.ended.set()


class Program:
    def __init__(self, number, count, machine):
        self.number, self.count, self.machine = number, count, machine
        self.buffers, self.mbarriers, self.hardware_barriers = [], {}, {}

    def check_end(self):
        for number, state in self.hardware_barriers.items():
            if state.there:
                left = f"{sum(state.there.values())} of {state.count} threads"
                raise RuntimeError(f"program {self.number} leaves hardware barrier {number} with {left}")
        if late := [state.name for state in self.mbarriers.values() if state.bytes]:
            raise RuntimeError(f"program {self.number} ends with loads in flight to {late}")


# Shared memory. What is written there without TMA is seen by TMA and matrix products after a fence only.


def poison(dtype):
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


class Shared:
    """A view of shared memory. ``buffer``: all of its bytes, and the name of its variable."""

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
        self.check_loaded()
        return Block(self.data.clone())

    def store(self, value):
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(f"a block {value.shape} of {value.dtype} to shared memory {self.shape} of {self.dtype}")
        self.data.copy_(value.data)
        here().unfenced.add(self.addresses())

    def addresses(self):
        first = self.data.data_ptr()
        steps = ((size - 1) * stride for size, stride in zip(self.data.shape, self.data.stride(), strict=True))
        return first, first + sum(steps) * self.dtype.itemsize

    def _meets(self, others):
        first, last = self.addresses()
        return any(low <= last and first <= high for low, high in others)

    def check_loaded(self):
        if self._meets(destination.addresses() for destination, _ in here().program.machine.loads):
            raise RuntimeError(f"{self.buffer[1]} is read while a load to it is in flight")

    def check_readable(self):
        """By TMA and matrix products."""
        self.check_loaded()
        for task in here().program.machine.tasks:
            if self._meets(task.unfenced):
                raise RuntimeError(f"{self.buffer[1]} is read asynchronously, but {task.name} wrote it without a fence")


def allocate(dtype, shape, name):
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    here().program.buffers.append(data)  # addresses are names
    return Shared(data.view(dtype).fill_(poison(dtype)).view(shape), (data, name))


def reinterpret(block, dtype, shape, layout):
    data = block.buffer[0][: math.prod(shape) * dtype.itemsize]
    return Shared(data.view(dtype).view(shape), block.buffer)


def fence_async_shared():
    here().unfenced.clear()


# TMA.


class TensorMap:
    """A descriptor."""

    def __init__(self, tensor, descriptor):
        self.shape, self.block, self.dtype, self.layout = descriptor.shape, list(descriptor.block), tensor.dtype, None
        self.block_type = SimpleNamespace(nbytes=math.prod(self.block) * tensor.dtype.itemsize)
        steps = [stride * tensor.dtype.itemsize for stride in descriptor.strides[:-1]]
        assert descriptor.strides[-1] == 1 and not any(step % 16 for step in (*steps, tensor.data_ptr())), descriptor
        self.memory = tensor.as_strided(descriptor.shape, descriptor.strides)

    def window(self, where):
        """The part of a block that is inside the tensor, and where it is in the block."""
        parts, inner = [], []
        for first, size, limit in zip(where, self.block, self.shape, strict=True):
            low, high = max(first, 0), max(min(first + size, limit), 0)
            parts.append(slice(low, max(low, high)))
            inner.append(slice(low - first, max(low, high) - first))
        return self.memory[tuple(parts)], tuple(inner)

    def check(self, shared):
        if shared.shape != self.block or shared.dtype != self.dtype:
            raise TypeError(f"{self.block} of {self.dtype} and {shared.shape} of {shared.dtype} in shared memory")


def tma_load(descriptor, where, barrier, destination):
    descriptor.check(destination)
    state, machine, where = _mbarrier(barrier), here().program.machine, list(map(int, where))

    def arrive():
        values, inner = descriptor.window(where)
        destination.data.zero_()[inner] = values
        state.change(data=-descriptor.block_type.nbytes)

    if machine.lazy:
        destination.data.fill_(poison(destination.dtype))
        machine.loads.append((destination, arrive))
    else:
        arrive()
    here().give_way()


def tma_store(descriptor, where, source, add=False):
    descriptor.check(source)
    source.check_readable()
    here().unread.append((descriptor, list(map(int, where)), source, add))
    if not here().program.machine.lazy:
        await_writes()
    here().give_way()


def tma_add(descriptor, where, source):
    tma_store(descriptor, where, source, add=True)


def store_wait(pendings):
    here().read(pendings)
    here().give_way()


def await_writes():
    here().read()
    here().write()


# Barriers.


class _Mbarrier:
    def __init__(self, name, count):
        self.name, self.count, self.arrivals = name, count, count
        self.bytes = self.phases = 0

    def change(self, arrivals=0, data=0):
        self.arrivals, self.bytes = self.arrivals - arrivals, self.bytes + data
        if self.arrivals < 0:
            raise RuntimeError(f"more arrivals at {self.name} than the {self.count} that it counts")
        if self.arrivals == 0 and self.bytes == 0:
            self.arrivals, self.phases = self.count, self.phases + 1

    def __str__(self):
        return f"{self.name} ({self.phases} phases ended; {self.arrivals} arrivals and {self.bytes} bytes to come)"


def _mbarrier(shared):
    state = here().program.mbarriers.get(shared.data.data_ptr())
    if state is None or shared.data.numel() != 1:
        raise RuntimeError(f"{shared.buffer[1]} is used as an mbarrier before mbarrier.init")
    return state


def mbarrier_init(shared, count):
    data, name = shared.buffer
    number = (shared.data.data_ptr() - data.data_ptr()) // 8
    here().program.mbarriers[shared.data.data_ptr()] = _Mbarrier(f"{name}[{number}]", count)


def mbarrier_arrive(shared, count=1):
    _mbarrier(shared).change(arrivals=count)
    here().give_way()


def mbarrier_expect(shared, size):
    """Arrives, too."""
    _mbarrier(shared).change(arrivals=1, data=int(size))


def mbarrier_wait(shared, phase, pred=True):
    """Until the phase of this parity has ended; of those before the first, the odd one has."""
    if pred:
        state = _mbarrier(shared)
        here().give_way(lambda: state.phases & 1 != phase, lambda: f"parity {int(phase)} of {state}")


def hardware_barrier(kind, number, count):
    task, number = here(), int(number)
    states = task.program.hardware_barriers
    state = states.setdefault(number, SimpleNamespace(there={}, count=count, times=0))
    if task in state.there or (state.there and state.count != count) or not 0 <= number < 16 or count % 32:
        raise RuntimeError(f"{task.name} comes to hardware barrier {number} of {count} threads, where is {state}")
    state.count, times = count, state.times
    state.there[task] = task.threads
    total = sum(state.there.values())
    if total > count:
        raise RuntimeError(f"{total} threads at hardware barrier {number} of {count}")
    if total == count:
        state.there, state.times = {}, times + 1
    ready = (lambda: state.times > times) if kind == "sync" else None
    task.give_way(ready, lambda: f"hardware barrier {number} ({sum(state.there.values())} of {count} threads there)")


# Matrix products.


class InFlight:
    """An accumulator that a product of 16-bit operands is to be added to, in fp32."""

    in_flight = True

    def __init__(self, a, b, accumulator):
        self.operands, self.accumulator, self.result = (a, b), accumulator, None
        self.shape = [a.shape[0], b.shape[1]]
        self.check()

    def __getattr__(self, name):
        raise RuntimeError(f"an accumulator is used ({name}) while a product is in flight to it")

    def check(self):
        for operand in self.operands:
            if isinstance(operand, Shared):
                operand.check_readable()

    def compute(self):
        if self.result is None:
            self.check()
            start = self.accumulator.result if isinstance(self.accumulator, InFlight) else self.accumulator.data
            self.result = torch.addmm(start, *(x.data.float() for x in self.operands))


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    if not is_async:
        raise NotImplementedError("warpgroup_mma without is_async has no emulation")
    if a.dtype != b.dtype or a.dtype.itemsize != 2 or acc.shape != [a.shape[0], b.shape[1]] or a.shape[1] != b.shape[0]:
        raise TypeError(f"product of {a.shape} {a.dtype} and {b.shape} {b.dtype} to {acc.shape}")
    product = InFlight(a, b, acc if use_acc else SimpleNamespace(data=torch.zeros(acc.shape)))
    here().products.append(product)
    if not here().program.machine.lazy:
        product.compute()
    here().give_way()
    return product


def complete_products(left):
    """Wait for all but the last products."""
    products = here().products
    while len(products) > left:
        products.pop(0).compute()
    here().give_way()
