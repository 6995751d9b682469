"""What makes `fa1` FlashAttention-1 and not only right: its state is in global memory, and its outer loop is over keys.

Results are checked with the other backends, in test_contract.py.
"""

from __future__ import annotations

import math
import os
import re

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)

from speedlight import launch, reference
from speedlight.backends import fa1
from speedlight.backends.contract import Needs
from speedlight.problem import describe
from speedlight.target import Target, target_of

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreter_only = pytest.mark.skipif(not INTERPRETING, reason="watches loads in Triton's interpreter")
runs_kernels = pytest.mark.skipif(not INTERPRETING and not torch.cuda.is_available(), reason="needs a GPU")

BLOCK = 64  # of rows and of keys, in the interpreter


@runs_kernels
def test_state_in_memory_takes_up_where_an_earlier_launch_stopped(device):
    """O, l and m hold the exact attention over the keys so far, and nothing else is needed to go on."""
    q, k, v = (torch.randn(2, n, 3, 32, device=device).half() for n in (150, 400, 400))
    o = torch.zeros(2, 3, 150, 32, device=device)
    row_l, row_m = torch.zeros(2, 3, 150, device=device), torch.full((2, 3, 150), -math.inf, device=device)
    for part, seen in ((slice(0, 170), 170), (slice(170, 400), 400)):
        problem, inputs = describe(q, k[:, part], v[:, part])
        names = ("q", "k", "v", "o", "row_l", "row_m")
        tensors = dict(zip(names, (*inputs[:3], o, row_l, row_m), strict=True))
        tile, _ = fa1.tiles(problem, target_of(device))

        def build(problem=problem, tensors=tensors, tile=tile):
            return fa1.forward_launch(problem, tensors, tile)

        launch.run(("test_fa1", seen), problem.device, tensors, build)
        out, lse = reference.attention(q, k[:, :seen], v[:, :seen], return_lse=True)
        torch.testing.assert_close(o.transpose(1, 2).double(), out, rtol=0, atol=5e-4)
        torch.testing.assert_close((row_m * math.log(2) + row_l.log()).double(), lse, rtol=0, atol=1e-5)


def _watch(monkeypatch, **tensors: torch.Tensor) -> list[tuple[str, int]]:
    """Every tile load from now on, as (which tensor, first row)."""
    loads, load_tile = [], fa1.load_tile

    def watched(base, start, *rest):
        address = int(base.handle.data.item())
        name = [n for n, t in tensors.items() if t.data_ptr() <= address < t.data_ptr() + t.numel() * t.element_size()]
        first = start.handle.data.item() if hasattr(start, "handle") else start
        loads.append((name[0] if name else "state", int(first)))
        return load_tile(base, start, *rest)

    monkeypatch.setattr(fa1, "load_tile", watched)
    return loads


def _pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> list[tuple[int, int]]:
    """(key block, row block) by first row, in the paper's order, without those that causal attention hides."""
    return [
        (n, m)
        for n in range(0, seqlen_k, BLOCK)
        for m in range(0, seqlen_q, BLOCK)
        if not causal or n <= min(m + BLOCK, seqlen_q) - 1 + seqlen_k - seqlen_q
    ]


@interpreter_only
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"), [(130, 200, False), (200, 200, True), (70, 200, True), (200, 70, True)]
)
def test_keys_are_loaded_once_and_rows_once_per_key_block(seqlen_q, seqlen_k, causal, monkeypatch):
    q, k, v = (torch.randn(1, n, 1, 16) for n in (seqlen_q, seqlen_k, seqlen_k))
    problem, inputs = describe(q, k, v, causal=causal)
    pairs = _pairs(seqlen_q, seqlen_k, causal)
    expected: dict[str, list] = {"forward": [], "backward": []}
    for n in range(0, seqlen_k, BLOCK):
        rows = [m for first_key, m in pairs if first_key == n]
        for direction, names in (("forward", ("q", "state")), ("backward", ("q", "dout", "out", "state"))):
            expected[direction] += [("k", n), ("v", n)] + [(name, m) for m in rows for name in names]

    loads = _watch(monkeypatch, q=q, k=k, v=v)
    out, lse = fa1.forward(problem, inputs)
    assert loads == expected["forward"]
    monkeypatch.undo()

    dout = torch.randn_like(out)
    loads = _watch(monkeypatch, q=q, k=k, v=v, out=out, dout=dout)
    fa1.backward(problem, inputs, out, lse, dout, None, Needs())
    assert loads == expected["backward"]


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_barriers_part_loads_and_stores_of_the_state(name, group_size):
    """Threads share the state, so it takes a barrier before it is overwritten and one before it is loaded again. No
    test that runs on a CPU, and few on a GPU, would notice that one is missing."""
    target = Target.parse(name)
    q = torch.empty(1, 512, 2 * group_size, 64, dtype=torch.float16, device="meta")
    k = torch.empty(1, 512, 2, 64, dtype=torch.float16, device="meta")
    problem, _ = describe(q, k, k, causal=True)
    lse = torch.empty(problem.lse_shape, device="meta")
    state = torch.empty(*problem.lse_shape, 64, device="meta")
    forward, backward = fa1.tiles(problem, target)
    read = {"q": q, "k": k, "v": k}
    for record, stored, after in (
        (fa1.forward_launch(problem, {**read, "o": state, "row_l": lse, "row_m": lse}, forward), 3, 0),
        (fa1.backward_launch(
            problem, {**read, "out": q, "dout": q, "lse": lse, "dq": state, "dk": k, "dv": k}, backward
        ), 1, 2),
    ):  # fmt: skip
        ttgir = launch.lower(record, target).asm["ttgir"]
        memory = [op for op in re.findall(r"tt\.load|tt\.store|barrier", ttgir)]
        stores = ["barrier", *["tt.store"] * stored]
        assert memory[-len(stores) - after - 1 :] == [*stores, *["tt.store"] * after, "barrier"], memory
        assert memory.count("barrier") == 2
