"""What differs between the supported versions of Triton, and which of them have run these kernels."""

import triton
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Gluon is an experimental language: a version counts once the GPU tests have passed with it.
_VERIFIED = ("3.6.",)


def unverified() -> str | None:
    if triton.__version__.startswith(_VERIFIED):
        return None
    verified = ", ".join(f"{version}x" for version in _VERIFIED)
    return f"its kernels have been verified with Triton {verified} only, and this is {triton.__version__}"


# Whether the kernels may use hardware barriers 5 to 15 besides Triton: where its own numbers are known.
NAMED_BARRIERS = triton.__version__.startswith("3.6.")
