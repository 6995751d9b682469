"""Corrections to Triton's interpreter (TRITON_INTERPRET=1), without which bf16 kernels cannot be tested on a CPU, and
what makes it faster.

The interpreter (3.6 to 3.9) keeps bf16 as raw 16-bit integers: ``tl.dot`` multiplies those integers, and a cast from
fp32 cuts off the low bits instead of rounding to nearest even as GPUs do. Elementwise bf16 arithmetic stays wrong;
the kernels do theirs in fp32.
"""

from __future__ import annotations

import functools

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_QUIET_NAN = np.uint16(0x7FC0)


def _widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to float32: a bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, to nearest, ties to even: add just under half of the part cut off, and one more if the
    part kept is odd."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded)


def _operand(handle: TensorHandle) -> np.ndarray:
    scalar = handle.dtype.scalar
    if scalar == tl.bfloat16:
        return _widen(handle.data)
    if scalar.is_floating() and scalar.primitive_bitwidth == 8:
        half = interpreter._convert_float(handle.data, handle.dtype, tl.float16, None)  # exact for both fp8 types
        return half.view(np.float16).astype(np.float32)
    return handle.data


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return TensorHandle(np.matmul(_operand(a), _operand(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


_original_cast = InterpreterBuilder.cast_impl


def _cast(self, src, dst_type):
    if dst_type.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32:
        return TensorHandle(_round(src.data), tl.bfloat16)
    return _original_cast(self, src, dst_type)


_original_patch = interpreter._patch_lang


@functools.cache
def _patch(fn):
    """The interpreter replaces triton.language's functions anew for every call of a function. Nothing else uses them in
    this process, so once is enough, and nothing is ever put back."""
    _original_patch(fn)
    return interpreter._LangPatchScope()


_of_scalar = functools.cache(interpreter._get_np_dtype)  # which builds a table in each call


def _np_dtype(dtype: tl.dtype) -> np.dtype:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _of_scalar(scalar)


def apply() -> None:
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _cast
    interpreter._patch_lang = _patch
    interpreter._get_np_dtype = _np_dtype
    # Every sum and product of integers once more in int64, for a check that takes place in debug mode only.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
