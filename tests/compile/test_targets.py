"""Every tile row compiled for every GPU it is meant for, without one: does it fit, use the matrix units, and keep its
values in registers?

A row is compiled with all options off and with all on, each once (compilers and assemblers give the same code for the
same input every time); tools/compile_all.py goes through the combinations.
"""

from __future__ import annotations

import dataclasses
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
    deterministic,
    everything,
    launches,
    modified,
    plain,
    unaligned,
)
from sass import unset_operands

from speedlight.backends import fa1, fa2, fa3
from speedlight.backends.fa2.tiles import BACKWARD, BACKWARD_SMALL, FORWARD, FORWARD_SMALL, family
from speedlight.backends.fa3 import tiles as fa3_tiles
from speedlight.target import Target

# The instruction of the matrix units. Triton has none for Turing, and NVIDIA none for float32 as such.
MATRIX_INSTRUCTION = {
    "sm_80": "HMMA", "sm_86": "HMMA", "sm_89": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA",
    "gfx942": "v_mfma",
}  # fmt: skip

SIMPLE = ("plain", "causal", "deterministic")
WITHOUT_PRODUCTS = ("bwd_delta", "bwd_preprocess", "bwd_convert")

# What kernels spill, where it is more than 32: bytes for each thread (AMD: registers), for head dimensions 64, 128 and
# 256, with options off or causal, and with all on. The larger of Triton 3.6.0 and 3.9.0, 2026-11-30. A quarter and 32
# more are let pass. The bounds are there to notice a change; whether a row is worth its spills, a GPU must say.
SPILLS = {
    "fa1 sm_90 fwd": ((0, 88, 0), (0, 0, 0)),
    "fa1 sm_90 bwd": ((0, 304, 0), (0, 0, 0)),
    "fa1 sm_100 fwd": ((0, 48, 0), (0, 0, 0)),
    "fa1 sm_120 fwd": ((0, 88, 0), (0, 0, 0)),
    "fa1 sm_120 bwd": ((120, 0, 0), (0, 0, 0)),
    "fa3 sm_90 fwd": ((144, 0, 248), (0, 0, 376)),
    "fa3 sm_90 bwd": ((304, 72, 192), (576, 472, 368)),
    "fa3 sm_90 bwd_dv": ((0, 0, 0), (0, 0, 104)),
    "fa3 sm_90 bwd_dq": ((0, 0, 248), (0, 0, 504)),
    "fa2 sm_75 bwd_dkdv": ((0, 0, 328), (56, 40, 576)),
    "fa2 sm_75 bwd_dq": ((0, 0, 200), (0, 0, 216)),
    "fa2 sm_75 bwd_dkdv_float32": ((0, 216, 208), (0, 0, 0)),
    "fa2 sm_80 fwd": ((0, 0, 0), (48, 184, 208)),
    "fa2 sm_80 bwd_dkdv": ((0, 0, 0), (784, 536, 120)),
    "fa2 sm_80 fwd_tensors": ((0, 0, 0), (0, 1160, 0)),
    "fa2 sm_80 bwd_dq_tensors": ((0, 0, 0), (0, 224, 0)),
    "fa2 sm_80 bwd_dkdv_tensors": ((0, 0, 0), (0, 1968, 0)),
    "fa2 sm_80 bwd_dkdv_float32": ((0, 208, 208), (0, 600, 664)),
    "fa2 sm_86 bwd_dkdv": ((0, 0, 0), (224, 0, 0)),
    "fa2 sm_86 bwd_dkdv_float32": ((0, 208, 200), (0, 0, 0)),
    "fa2 sm_90 bwd_dkdv": ((0, 48, 320), (864, 704, 888)),
    "fa2 sm_90 bwd_dq": ((0, 0, 80), (40, 0, 48)),
    "fa2 sm_90 bwd_delta_float32": ((0, 0, 72), (0, 0, 0)),
    "fa2 sm_90 bwd_dkdv_float32": ((0, 232, 232), (0, 0, 0)),
    "fa2 sm_90 fwd_tensors": ((0, 0, 0), (176, 504, 0)),
    "fa2 sm_90 bwd_dq_tensors": ((0, 0, 0), (64, 216, 0)),
    "fa2 sm_90 bwd_dkdv_tensors": ((0, 0, 0), (1032, 896, 0)),
    "fa2 sm_90 bwd_dkdv_functions": ((0, 0, 0), (776, 0, 0)),
    "fa2 sm_100 fwd": ((0, 0, 64), (120, 0, 760)),
    "fa2 sm_100 bwd_dkdv": ((0, 0, 0), (808, 72, 304)),
    "fa2 sm_100 bwd_dkdv_float32": ((0, 232, 232), (0, 0, 0)),
    "fa2 gfx942 bwd_dkdv_float32": ((0, 0, 67), (0, 0, 109)),
    "fa2 gfx942 bwd_dq_float32": ((0, 0, 66), (0, 0, 112)),
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
        for name, dim, terms in (
            ("sm_90", 64, "tensors"), ("sm_90", 128, "tensors"), ("sm_90", 64, "functions"), ("sm_80", 128, "tensors"),
            ("gfx942", 64, "tensors"),
        ):  # fmt: skip
            if str(target) == name:
                yield Check(fa2, target, modified(terms)(dim, half))
        for dim, *_ in fa1._TILES[family(target)]:
            yield Check(fa1, target, causal(dim, half))
        if str(target) == "sm_90":
            for variant in (plain, causal, everything, deterministic):
                for dim in (64, 128, 256):
                    if variant is not deterministic or dim < 256:  # where it makes no difference
                        yield Check(fa3, target, variant(dim, half))
            # As long as its tile for short masked sequences serves.
            yield Check(fa3, target, dataclasses.replace(causal(64, half), seqlen=fa3_tiles.SHORT_MASKED))
            yield Check(fa3, target, dataclasses.replace(causal(192, half), head_dim_v=128))


CHECKS = list(checks())


@pytest.fixture(scope="module")
def compiled():
    """Each check's code, compiled once: {check: {kernel: code}}."""
    done: dict[int, dict[str, Code]] = {}

    def get(number: int) -> dict[str, Code]:
        if number not in done:
            check = CHECKS[number]
            found = launches(*check)
            if isinstance(found, str):  # the only reason for which a row may serve some of its targets and not others
                assert "shared memory" in found, found
                pytest.skip(found)
            done[number] = {name: compile_code(record, check.target) for name, record in found.items()}
        return done[number]

    return get


def spill_bound(check: Check, kernel: str) -> float:
    backend = check.backend.__name__.rpartition(".")[2]
    dtype = "_float32" if check.variant.dtype is torch.float32 else f"_{check.variant.terms}".rstrip("_")
    off, on = SPILLS.get(f"{backend} {check.target} {kernel}{dtype}", ((0, 0, 0), (0, 0, 0)))
    row = off if check.variant.name in SIMPLE else on
    dim = check.variant.block_dim
    return 1.25 * row[(dim > 64) + (dim > 128)] + 32


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
    if variant.name in SIMPLE:
        has_units = variant.dtype.itemsize == 2 or target.kind == "hip"
        expected = MATRIX_INSTRUCTION.get(str(target)) if has_units else None
        for name, code in codes.items():
            found = {i for i in MATRIX_INSTRUCTION.values() if code.count(i)}
            if expected is None or name in WITHOUT_PRODUCTS:
                assert not found, f"{name} of {check}"
            else:
                assert expected in found, f"{name} of {check}"
    if str(target) == "sm_90":
        for name, code in codes.items():
            assert not unset_operands(code.text), f"{name} of {check}: addresses of operands are not set on every path"
    if str(target) == "sm_90" and variant.dtype.itemsize == 2 and variant.name in SIMPLE:
        for name, code in codes.items():
            assert not assembler_notes(code), f"{name} of {check}: serialised matrix instructions"
            # Serialised code waits after each of them.
            waits, products = code.count("WARPGROUP.DEPBAR"), code.count("HGMMA")
            assert 2 * waits <= products, f"{name} of {check}: {waits} waits for {products} products"
            by_tma = check.backend is fa3 and name not in WITHOUT_PRODUCTS
            assert (code.count("UTMALDG") > 0) == by_tma, f"{name} of {check}"
