"""Every tile row compiled for every GPU it is meant for, without one: does it fit, use the matrix units, and keep its
values in registers?

A row is compiled with all options off and with all on, each once (compilers and assemblers give the same code for the
same input every time); tools/compile_all.py goes through the combinations.
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

from lowering import (
    TARGETS,
    Code,
    Variant,
    assembler_notes,
    causal,
    compile_code,
    everything,
    launches,
    plain,
    unaligned,
)

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


@pytest.fixture(scope="module")
def compiled():
    """Each check's code, compiled once: {check: {kernel: code}}."""
    done: dict[int, dict[str, Code]] = {}

    def get(number: int) -> dict[str, Code]:
        if number not in done:
            check = CHECKS[number]
            found = launches(*check)
            assert not isinstance(found, str), f"refused: {found}"
            done[number] = {name: compile_code(record, check.target) for name, record in found.items()}
        return done[number]

    return get


def measured(codes: dict[str, Code]) -> str:
    return "; ".join(f"{name}: {c.spills} spilled, {c.shared} shared" for name, c in codes.items())


@pytest.mark.parametrize("number", range(len(CHECKS)), ids=[str(check) for check in CHECKS])
def test_tile_row(compiled, number):
    check, codes = CHECKS[number], compiled(number)
    target, variant = check.target, check.variant
    for name, code in codes.items():
        what = f"{name} of {check}"
        assert code.shared <= target.shared_memory, f"{what}: {code.shared} bytes of shared memory"
        assert code.spills <= spill_bound(check, name), f"{what} spills more than its bound; {measured(codes)}"
    if variant.name in ("plain", "causal"):
        expected = MATRIX_INSTRUCTIONS.get(str(target), []) if variant.dtype.itemsize == 2 else []
        for name, code in codes.items():
            found = [i for i in ALL_MATRIX_INSTRUCTIONS if code.count(i)]
            assert found == ([] if name == "bwd_delta" else expected), f"{name} of {check}"
    if str(target) == "sm_90" and variant.dtype.itemsize == 2 and variant.name in ("plain", "causal"):
        for name, code in codes.items():
            assert not assembler_notes(code), f"{name} of {check}: serialised matrix instructions"
            # Serialised code waits after each of them.
            waits, products = code.count("WARPGROUP.DEPBAR"), code.count("HGMMA")
            assert 2 * waits <= products, f"{name} of {check}: {waits} waits for {products} products"
