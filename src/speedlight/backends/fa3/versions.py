"""What differs between the supported versions of Triton, and which of them have run these kernels."""

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(descriptor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Add a block in shared memory to one in global memory. (Triton 3.6 can do this but has no function for it.)"""
    where = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, where, source.handle)


@builtin
def reinterpret(block: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as a block of another kind."""
    method = getattr(block, "reinterpret", None) or block._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


# Gluon is an experimental language: a version counts once the GPU tests have passed with it.
_VERIFIED = ("3.6.",)


def unverified() -> str | None:
    if triton.__version__.startswith(_VERIFIED):
        return None
    verified = ", ".join(f"{version}x" for version in _VERIFIED)
    return f"its kernels have been verified with Triton {verified} only, and this is {triton.__version__}"


# Whether the kernels may use hardware barriers 5 to 15 besides Triton: where its own numbers are known.
NAMED_BARRIERS = triton.__version__.startswith("3.6.")
