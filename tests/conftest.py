"""Shared fixtures: memory that Speedlight allocates without filling holds NaN, every test has the same random seed.

With TRITON_INTERPRET=1 kernels run in Triton's interpreter on CPU tensors, corrected by interpreter.py.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

# Tested here, not yet the default.
os.environ["SPEEDLIGHT_FA3_BACKWARD"] = "1"
os.environ["SPEEDLIGHT_FA2_TERMS"] = "1"

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.apply()

# Under xdist each worker would start a thread per core; small problems are faster without.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else torch.get_num_threads())

_ALLOCATORS = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]


def _poison(dtype: torch.dtype):
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max  # useless as an index or a count


def _poisoned(allocate):
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        # Under compilation dynamo traces this function, and frames are out of its reach.
        if torch.compiler.is_compiling():
            return tensor
        if sys._getframe(1).f_globals.get("__name__", "").startswith("speedlight"):
            with torch.no_grad():
                tensor.fill_(_poison(tensor.dtype))
        return tensor

    return wrapper


@pytest.fixture(autouse=True)
def poison_empty(monkeypatch):
    """Values that a backend forgets to write come out as NaN instead of whatever lay there, usually zeros."""
    for owner, name in _ALLOCATORS:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20221127)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
