"""What a device can do, described without touching it: the key of tile tables and compile checks."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

import torch

TRITON_MIN, TRITON_BELOW = (3, 6), (3, 10)


@dataclass(frozen=True)
class Target:
    """A compilation target.

    kind: "cuda", "hip", "interpreter" (Triton's, on CPU tensors) or "torch" (any device without Triton).
    arch: 90 for sm_90, "gfx942" for AMD, 0 where there is none.
    """

    kind: str
    arch: int | str = 0

    def __str__(self) -> str:
        return {"cuda": f"sm_{self.arch}", "hip": str(self.arch)}.get(self.kind, self.kind)

    @classmethod
    def parse(cls, name: str) -> Target:
        """Target of a name such as "sm_90" or "gfx942"."""
        if name.startswith("sm_") and name[3:].isdigit():
            return cls("cuda", int(name[3:]))
        if name.startswith("gfx"):
            return cls("hip", name)
        if name in ("interpreter", "torch"):
            return cls(name)
        raise ValueError(f"unknown target {name!r}: expected sm_<number>, gfx<name>, interpreter or torch")

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("cuda", "hip")

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program may use."""
        if self.kind == "cuda":
            assert isinstance(self.arch, int)
            return _CUDA_SHARED_KIB.get(self.arch, 99) * 1024
        return (160 if self.arch == "gfx950" else 64) * 1024


# CUDA C programming guide, "Technical specifications per compute capability": maximum per thread block.
_CUDA_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@functools.cache
def triton_problem() -> str | None:
    """None if a supported Triton can be imported, else one sentence that says why not."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it comes with CUDA builds of torch; elsewhere: pip install speedlight[triton])"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a Triton on the path without its metadata
        import triton

        version = triton.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not TRITON_MIN <= numbers < TRITON_BELOW:
        low, high = (".".join(map(str, v)) for v in (TRITON_MIN, TRITON_BELOW))
        return f"Triton {version} is installed; Speedlight supports Triton >={low},<{high}"
    return None


@functools.cache
def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def target_of(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("interpreter") if interpreting() and triton_problem() is None else Target("torch")
    if device.type != "cuda" or triton_problem() is not None:
        return Target("torch")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0])
    return Target("cuda", properties.major * 10 + properties.minor)
