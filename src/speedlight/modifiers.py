"""Masks and biases written as functions of positions.

A modifier function is a plain, module-level function

    fn(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, *aux)

over batch, head, row and key numbers (non-negative, within the sequence) and the sequence's lengths. A mask returns
True where the key is visible, a bias returns what is added to the score. Written with arithmetic and comparisons only,
the same function runs on index tensors here and inside a Triton or Gluon kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

Axis = Literal["head", "q", "kv"]
_AXES = ("head", "q", "kv")


def check_function(fn: Callable[..., Any], what: str) -> None:
    """Refuse functions that a kernel cannot be compiled from, with the reason."""
    if torch.compiler.is_compiling():
        return  # Dynamo mistraces __qualname__; an unusable function fails when the op looks it up by name
    if not inspect.isfunction(fn):
        raise TypeError(f"{what}: expected a plain Python function, got {type(fn).__name__}")
    if fn.__closure__ is not None or "<locals>" in fn.__qualname__ or fn.__name__ == "<lambda>":
        raise ValueError(
            f"{what}: {fn.__name__!r} is a closure or a local function. Kernels are cached by source, so two closures "
            "with different captured values would look the same. Write a module-level function and pass the values "
            "through aux."
        )


def function_name(fn: Callable[..., Any]) -> str:
    """The "module:name" form in which a function crosses an operator schema."""
    return f"{fn.__module__}:{fn.__name__}"


def function_from_name(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class _Modifier:
    fn: Callable[..., Any]
    aux: tuple[tuple[Axis, torch.Tensor], ...] = ()

    def __init__(self, fn: Callable[..., Any], aux: Sequence[tuple[Axis, torch.Tensor]] = ()):
        kind = type(self).__name__
        check_function(fn, kind)
        for n, entry in enumerate(aux):
            axis, tensor = entry
            if axis not in _AXES:
                raise ValueError(f"{kind}.aux[{n}]: axis must be one of {_AXES}, got {axis!r}")
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(f"{kind}.aux[{n}]: expected a 1-D tensor along {axis!r}, got {shape}")
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{kind}.aux[{n}] requires grad, and no gradient is written for it. Pass the bias as a tensor to "
                    "get its gradient, or detach() the values."
                )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "aux", tuple((axis, tensor) for axis, tensor in aux))

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.aux)


class Mask(_Modifier):
    """A boolean mask as a function: True where query row ``q_idx`` may see key ``kv_idx``.

    Args:
        fn: ``fn(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, *aux) -> bool``, module-level. ``q_idx`` and ``kv_idx`` count
            from 0 within the sequence; ``b`` is the batch entry (the sequence, in varlen).
        aux: ``(axis, tensor)`` pairs; ``fn`` receives the values at the current head, row or key. The tensors are 1-D:
            (H,) along "head"; along "q" and "kv" (Sq,) and (Sk,), in varlen (total_q,) and (total_k,).
    """


class Bias(_Modifier):
    """An additive bias as a function, in natural-log units, added after softcap and ALiBi; arguments as in Mask."""
