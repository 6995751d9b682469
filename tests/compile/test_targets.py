"""Every tile row compiled for every GPU it is meant for, without one: does it fit, does it use the matrix units, does it
keep its values in registers?

A row is compiled with all options off and with all on, each once; tools/compile_all.py goes through the combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from speedlight import target as targets

if targets.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if targets.interpreting():
    pytest.skip("compiles kernels, which Triton's interpreter cannot", allow_module_level=True)

from lowering import TARGETS, Code, Variant, assembler_notes, causal, compile_code, everything, launches, plain, unaligned

from speedlight.backends import fa1, fa2
from speedlight.backends.fa2.tiles import BACKWARD, BACKWARD_SMALL, FORWARD, FORWARD_SMALL, family
from speedlight.target import Target

# The instruction of the matrix units. Triton has none for Turing and for float32 as such; on Hopper and Blackwell it
# takes the older HMMA for tiles of fewer than 64 rows.
MATRIX_INSTRUCTIONS = {
    "sm_80": ["HMMA"], "sm_86": ["HMMA"], "sm_89": ["HMMA"], "sm_90": ["HGMMA"], "sm_100": ["UTCHMMA"],
    "sm_120": ["HMMA"], "gfx942": ["v_mfma"],
}  # fmt: skip


class Check(NamedTuple):
    backend: ModuleType
    target: Target
    variant: Variant

    def __str__(self) -> str:
        backend, dtype = self.backend.__name__.rpartition(".")[2], str(self.variant.dtype).removeprefix("torch.")
        return f"{backend}-{self.target}-{self.variant.name}-{self.variant.block_dim}-{dtype}"


def checks() -> Iterator[Check]:
    first_of_family: dict[str, Target] = {}
    for target in TARGETS:
        first_of_family.setdefault(family(target), target)
    small = {row.largest for row in (*FORWARD_SMALL, *BACKWARD_SMALL)}
    for target in TARGETS:
        half = torch.float16 if str(target) == "sm_75" else torch.bfloat16
        alone = first_of_family[family(target)] is target
        rows = {row.largest for table in (FORWARD, BACKWARD) for row in table[family(target)]}
        for dim in sorted(rows):
            yield Check(fa2, target, plain(dim, half))
            if str(target) == "sm_90":
                yield Check(fa2, target, causal(dim, half))
            if alone:  # the others differ in nothing that the options touch
                yield Check(fa2, target, everything(dim, half))
        for dim in sorted(small):
            if alone:
                yield Check(fa2, target, plain(dim, torch.float32))
            if str(target) in ("sm_80", "gfx942"):
                yield Check(fa2, target, everything(dim, torch.float32))
            if str(target) in ("sm_90", "gfx942") and dim < 256:
                yield Check(fa2, target, unaligned(dim, half))
        for dim, *_ in fa1._TILES[family(target)]:
            yield Check(fa1, target, causal(dim, half))


CHECKS = list(checks())
