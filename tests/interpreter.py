"""Corrections to Triton's interpreter (TRITON_INTERPRET=1), without which bf16 kernels cannot be tested on a CPU.

The interpreter (3.6 to 3.9) keeps bf16 as raw 16-bit integers: ``tl.dot`` multiplies those integers, and a cast from
fp32 cuts off the low bits instead of rounding to nearest even as GPUs do. Elementwise bf16 arithmetic stays wrong;
the kernels do theirs in fp32.
"""

from __future__ import annotations

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


def apply() -> None:
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _cast
