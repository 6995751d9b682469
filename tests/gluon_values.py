"""The values of the Gluon emulator (gluon_emulator.py): scalars are Int, np.float32, bool, or plain numbers where the
kernel has written them; what has axes is a Block.
"""

from __future__ import annotations

import operator
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor


class Int(int):
    def to(self, dtype):
        return self


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


def plain(*values):
    """The torch tensors or Python numbers behind operands."""
    if any(getattr(x, "in_flight", False) for x in values):
        raise RuntimeError("an accumulator is read while a product is in flight to it")
    shapes = [x.shape for x in values if isinstance(x, Block)]
    if len(set(map(len, shapes))) > 1:
        raise TypeError(f"blocks of shapes {shapes} in one operation")
    found = [x.data if isinstance(x, Block) else float(x) if isinstance(x, np.floating) else x for x in values]
    return found[0] if len(found) == 1 else found


def value_of(data):
    """What a kernel gets: a number if there are no axes."""
    if data.dim():
        return Block(data)
    return np.float32(data) if data.dtype.is_floating_point else Int(data)


def _truncated(a, b):
    """a // b as in C."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _operator(compute, of_ints, swapped):
    def method(a, b):
        if not isinstance(b, int if of_ints else Block | int | float | np.floating):
            return NotImplemented
        a, b = (int(a), int(b)) if of_ints else plain(a, b)
        result = compute(b, a) if swapped else compute(a, b)
        return Int(result) if of_ints else Block(result)

    return method


_ARITHMETIC = {
    name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "and", "or", "xor", "rshift")
} | {
    "floordiv": _truncated,
    "mod": lambda a, b: a - _truncated(a, b) * b,
}
for _name, _compute in _ARITHMETIC.items():
    for _class in (Int, Block):
        setattr(_class, f"__{_name}__", _operator(_compute, _class is Int, False))
        setattr(_class, f"__r{_name}__", _operator(_compute, _class is Int, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "truediv"):  # of an Int they are as they should be
    setattr(Block, f"__{_name}__", _operator(getattr(operator, _name), False, False))
Block.__rtruediv__ = _operator(operator.truediv, False, True)
