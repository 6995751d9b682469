"""`fa3` on CPU tensors: its Gluon kernels in the emulator (gluon_emulator.py), the kernels around them in Triton's
interpreter, against the float64 reference. And the emulator itself: it notices what a GPU may forgive.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import os
import sys
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs the kernels around the emulated ones in Triton's interpreter", allow_module_level=True)

import gluon_emulator
from gluon_emulator import Deadlock

from speedlight import launch, reference, testing
from speedlight.backends import fa3
from speedlight.backends.contract import Needs
from speedlight.backends.fa3.tiles import BwdTile, FwdTile
from speedlight.problem import describe
from speedlight.testing import Case, check_result, compare, make_grads, make_inputs, run, run_reference

BF16, F16 = torch.bfloat16, torch.float16
BULK = BwdTile(64, start_at_lse=True, bulk_dq=True)


@dataclass(frozen=True)
class Way:
    """How kernels run: tiles (None: those of the table), barriers, and the emulator's options."""

    name: str
    forward: FwdTile | None = None
    backward: BwdTile | None = None
    named: bool = True
    options: dict = field(default_factory=dict, hash=False)


def _at_random(seed: int) -> dict:
    return dict(lazy=True, seed=seed, together=True)


EAGER = Way("eager")
RANDOM = Way("random", options=_at_random(1))


class Emulated:
    """fa3 with its launches executed here."""

    def __init__(self, monkeypatch):
        self.way, self.names, self.counter = EAGER, [], torch.zeros(2, dtype=torch.int32)
        self.alter = lambda record: record
        forward_tile, backward_tile = fa3.forward_tile, fa3.backward_tile
        monkeypatch.setattr(launch, "run", self._run)
        monkeypatch.setattr(fa3, "_counter", lambda device: self.counter)
        monkeypatch.setattr(fa3, "_num_sms", lambda device: 3)
        monkeypatch.setattr(fa3, "OWN_BACKWARD", True)
        monkeypatch.setattr(fa3, "unverified", lambda: None)
        monkeypatch.setattr(fa3, "forward_tile", lambda problem: self.way.forward or forward_tile(problem))
        monkeypatch.setattr(fa3, "backward_tile", lambda problem: self.way.backward or backward_tile(problem))

    def _run(self, key, device, tensors, build):
        records = build()
        for record in [records] if isinstance(records, launch.Launch) else records:
            self.names.append(record.kernel.__name__.removeprefix("_attn_").removesuffix("_kernel"))
            if "NAMED" in record.args:
                record.args["NAMED"] = self.way.named
                gluon_emulator.run(self.alter(record), **self.way.options)
                assert self.counter.tolist() == [0, 0]
            else:
                record.kernel[record.grid](*record.leading().values(), **record.args, **record.meta())

    def attention(self, q, k, v, *cu_seqlens, return_lse, **options):
        problem, inputs = describe(*(t.detach() for t in (q, k, v)), *cu_seqlens, **options)
        assert fa3.supports(problem, target.Target("cuda", 90)) is None
        return _Attention.apply(q, k, v, problem, inputs)

    def check(self, case: Case, way: Way) -> None:
        self.way = way
        inputs, dout, dlse = _prepared(case)
        result = run(self.attention, self.attention, inputs, dout, dlse)
        assert self.names == ["fwd", "bwd_preprocess", "bwd", "bwd_convert"]
        with mock.patch.object(testing, "run_reference", lambda *_given: _reference(case)):
            check_result(case, inputs, result, dout, dlse)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, problem, inputs):
        ctx.set_materialize_grads(False)
        out, lse = fa3.forward(problem, inputs)
        ctx.save_for_backward(out, lse)
        ctx.problem, ctx.inputs = problem, inputs
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        grads = fa3.backward(ctx.problem, ctx.inputs, *ctx.saved_tensors, dout, dlse, Needs())
        return grads.q, grads.k, grads.v, None, None


@functools.cache
def _prepared(case: Case):
    inputs = make_inputs(case)
    return inputs, *make_grads(case, inputs)


@functools.cache
def _reference(case: Case):
    """Takes longer than the emulation, and is the same for all ways."""
    return run_reference(*_prepared(case))


@pytest.fixture
def emulated(monkeypatch):
    return Emulated(monkeypatch)


def _case(name: str, seqlen_q: int = 200, seqlen_k: int = 200, head_dim: int = 64, heads: int = 2, **options) -> Case:
    options = dict(batch=1, num_heads=heads, num_heads_kv=1, dtype=BF16) | options
    return Case(name, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, **options)


def _packed(name: str, lengths_q=(70, 0, 130, 5), lengths_k=(100, 40, 150, 0), **options) -> Case:
    return _case(name, lengths_q=lengths_q, lengths_k=lengths_k, tail=3, **options)


CASES = [
    _case("plain", 256, 256, dtype=F16),
    _case("odd", 130, 300, head_dim=16, batch=2, heads=1),
    _case("causal", 256, 256, causal=True),
    _case("causal_dims", 150, 150, head_dim=24, head_dim_v=40, dtype=F16, causal=True),
    _case("causal_more_keys", 70, 290, causal=True, lse_grad=True),
    _case("causal_blind_rows", 290, 70, causal=True, lse_grad=True),
    _case("window", 270, 270, heads=1, window=(70, 20)),
    _case("window_left", 300, 300, heads=1, window=(130, None), dtype=F16),
    _case("window_right", 140, 260, window=(None, 50)),
    _case("softcap", 140, 260, heads=1, softcap=3.0, std=3.0, causal=True),
    _case("gqa", 130, 140, heads=4, num_heads_kv=2, causal=True, lse_grad=True),
    _case("seqused", 140, 260, batch=3, heads=1, seqused_q=(140, 0, 70), seqused_k=(200, 100, 0)),
    _case("scale_negative", 140, 260, heads=1, softmax_scale=-0.2, causal=True),
    _packed("varlen"),
    _packed("varlen_causal", causal=True, lse_grad=True, dtype=F16),
    _packed("varlen_window", window=(40, 20)),
    _packed("varlen_seqused", seqused_q=(60, 0, 130, 2), seqused_k=(100, 30, 20, 0), causal=True),
]
WAYS = [
    EAGER,
    Way("in_order", FwdTile(2, 64, 2, pingpong=False), BwdTile(64), named=False),
    Way("late", FwdTile(3, 128, 4), BULK, options=dict(lazy=True)),
    Way("random", FwdTile(3, 128, 4), BwdTile(128), options=_at_random(1)),
    Way("random_bulk", FwdTile(2, 128, 2), BULK, named=False, options=_at_random(2)),
]
CASES_128 = [
    _case("plain", 128, 256, head_dim=128, heads=1),
    _case("causal", 150, 200, head_dim=72, head_dim_v=128, heads=1, causal=True, dtype=F16),
    _case("gqa_window", 130, 200, head_dim=128, heads=2, window=(40, 30)),
    _packed("varlen_causal", head_dim=128, heads=1, causal=True, lse_grad=True),
]
BY_NAME = {case.name: case for case in CASES}
by_name = dict(ids=lambda value: value.name)


@pytest.mark.parametrize("way", WAYS, **by_name)
@pytest.mark.parametrize("case", CASES, **by_name)
def test_dim_64(emulated, case, way):
    emulated.check(case, way)


@pytest.mark.parametrize("way", [EAGER, RANDOM, Way("by_threads", None, BwdTile(64), False, _at_random(3))], **by_name)
@pytest.mark.parametrize("case", CASES_128, **by_name)
def test_dim_128(emulated, case, way):
    emulated.check(case, way)


@pytest.mark.parametrize("way", [EAGER, RANDOM], **by_name)
@pytest.mark.parametrize("head_dim", [(192, 128), (256, 256)], ids=str)
def test_forward_of_larger_dims(emulated, head_dim, way):
    case = _case("large", 150, 200, *head_dim[:1], heads=1, head_dim_v=head_dim[1], causal=True)
    emulated.way = way
    inputs = make_inputs(case)
    out, lse = emulated.attention(*inputs[:3], return_lse=True, **inputs.options)
    expected, expected_lse = reference.attention(*inputs[:3], return_lse=True, **inputs.options)
    testing.assert_close(out, expected, testing.naive_attention(*inputs[:3], **inputs.options))
    testing.assert_lse_close(lse, expected_lse, case.seqlen_k)


@pytest.mark.parametrize("way", [EAGER, *WAYS[2:]], **by_name)
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[13]], **by_name)
def test_a_tile_whose_first_maximum_is_far_too_low_is_sent_again(emulated, monkeypatch, case, way):
    """The last block of keys, which comes first, has tiny scores, and the first one scores hundreds larger."""
    waits = _count_waits_for_writes(monkeypatch)
    inputs, dout, dlse = _prepared(case)
    sizes = torch.linspace(100, 0, inputs.k.shape[-3])[:, None, None]
    inputs = inputs.replace({"k": (inputs.k * sizes).to(inputs.k.dtype)})
    emulated.way = way
    result = run(emulated.attention, emulated.attention, inputs, dout, dlse)
    compare(result, run_reference(inputs, dout, dlse), case.name, case.longest_k)
    assert waits


def _count_waits_for_writes(monkeypatch) -> list:
    """One entry for each tile that a warpgroup does again."""
    waits: list = []
    (code,) = (code for code in gluon_emulator._ASSEMBLY if "wait_group" in code)
    original = gluon_emulator._ASSEMBLY[code]
    monkeypatch.setitem(gluon_emulator._ASSEMBLY, code, lambda zero: (waits.append(1), original(zero))[1])
    return waits


@pytest.mark.parametrize("tile", [BwdTile(128), BULK], ids=["by_threads", "bulk"])
def test_gradients_that_are_not_needed_are_left_out(emulated, tile):
    emulated.way = replace(EAGER, backward=tile)
    inputs, dout, dlse = _prepared(BY_NAME["gqa"])
    problem, tensors = describe(*inputs[:3], **inputs.options)
    out, lse = fa3.forward(problem, tensors)
    everything = fa3.backward(problem, tensors, out, lse, dout, dlse, Needs())
    for wanted in ("q", "k", "v", "kv", "qv"):
        emulated.names.clear()
        needs = Needs(*(name in wanted for name in "qkv"))
        grads = fa3.backward(problem, tensors, out, lse, dout, dlse, needs)
        assert "bwd" in emulated.names
        for name in "qkv":
            grad = getattr(grads, name)
            assert torch.equal(grad, getattr(everything, name)) if name in wanted else grad is None, (wanted, name)


# What is known to be wrong.


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=(
    "dV of the second warpgroup is staged 64 * BLOCK_DV * 2 bytes into dQ's shared memory, which belong to the first "
    "one, whose dK is on its way from there, if BLOCK_DV < BLOCK_D"
))  # fmt: skip
def test_dv_of_fewer_columns_than_dk(emulated):
    emulated.check(_case("narrow_v", 64, 128, head_dim=128, head_dim_v=64, heads=1), RANDOM)


_FROM_NEIGHBOUR = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="0 * NaN of rows past a sequence is added to dQ of the next one"
)


@pytest.mark.parametrize(
    ("spoilt", "tile"),
    [
        *((spoilt, tile) for spoilt in "qkv" for tile in (BwdTile(128), BwdTile(64))),
        ("q", BULK),
        pytest.param("k", BULK, marks=_FROM_NEIGHBOUR),
        ("v", BULK),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.block_m}{'_bulk' * value.bulk_dq}",
)
def test_nan_in_a_sequence_stays_there(emulated, spoilt, tile):
    emulated.way = replace(EAGER, backward=tile)
    case = _packed("neighbours", (70, 60), (70, 60), heads=1, causal=True)
    inputs, dout, dlse = _prepared(case)
    values = inputs.leaves[spoilt].clone()
    values[5, 0, 3] = math.nan
    clean = run(emulated.attention, emulated.attention, inputs, dout, dlse)
    found = run(emulated.attention, emulated.attention, inputs.replace({spoilt: values}), dout, dlse)
    assert torch.equal(found.out[70:], clean.out[70:]) and torch.equal(found.lse[:, 70:], clean.lse[:, 70:])
    for name, grad in found.grads.items():
        assert torch.equal(grad[70:], clean.grads[name][70:]), f"d{name}"


# What the emulator notices: a kernel with one change is refused, or comes out wrong.


_LONG = _case("long", 150, 300, heads=1)
_CAUSAL, _VARLEN = _case("causal", 300, 300, heads=1, causal=True), _packed("varlen", causal=True)
_BULK = replace(RANDOM, backward=BULK)
_TWO_STAGES = replace(RANDOM, forward=FwdTile(2, 64, 2, pingpong=False))
_MBARRIERS = replace(_TWO_STAGES, named=False)
_EITHER = (AssertionError, RuntimeError)


@dataclass(frozen=True)
class Change:
    """In a module of fa3, and how it comes out: one of these errors in one of a few random runs."""

    name: str
    module: str
    old: str
    new: str
    error: type[Exception] | tuple[type[Exception], ...] = AssertionError
    case: Case = _LONG
    way: Way = RANDOM


def _swap(*lines: str) -> tuple[str, str]:
    return "".join(lines), "".join(reversed(lines))


CHANGES = [
    Change("k_released_early", "forward", *_swap(
        "                    s = warpgroup_mma_wait(1, deps=[s_token])\n",
        "                    release(k_empty, stage, 5, NWG, NAMED)\n",
    ), RuntimeError, way=_TWO_STAGES),
    Change("v_released_early", "forward", *_swap(
        "                    o, p16, p, l_i = warpgroup_mma_wait(0, deps=[o_token, p16, p, l_i])\n",
        "                    release(v_empty, before, 12, NWG, NAMED)\n",
    ), _EITHER, way=_TWO_STAGES),
    Change("v_not_awaited", "forward", "mbarrier.wait(v_full.index(before), ((it - 1) // NST) & 1)", "pass",
           RuntimeError),
    Change("out_overwritten", "forward", "    tma.store_wait(0)\n    o_rows.store(", "    o_rows.store(",
           case=_case("many", 600, 100)),
    Change("out_not_fenced", "forward", "    fence_async_shared()\n    if RAGGED:", "    if RAGGED:", RuntimeError),
    Change("a_turn_left", "forward", "if PINGPONG and NAMED and WG == 0:", "if False:", RuntimeError,
           way=replace(RANDOM, forward=FwdTile(3, 128, 4))),
    Change("product_read_early", "forward", "s = warpgroup_mma_wait(1, deps=[s_token])", "s = s_token", RuntimeError),
    Change("one_arrival_too_many_to_wait_for", "forward", "init(k_empty.index(i), count=NWG)",
           "init(k_empty.index(i), count=NWG + 1)", Deadlock, way=_MBARRIERS),
    Change("one_arrival_too_few_to_wait_for", "forward", "init(k_empty.index(i), count=NWG)",
           "init(k_empty.index(i), count=NWG - 1)", _EITHER, way=_MBARRIERS),
    Change("unknown_assembly", "common", "lg2.approx", "ex2.approx", NotImplementedError),
    Change("unknown_function", "common", "gl.exp2(", "gl.exp(", NotImplementedError),
    Change("wrong_parity", "common", "mbarrier.wait(empty.index(n % NST), ((n // NST) & 1) ^ 1)",
           "mbarrier.wait(empty.index(n % NST), (n // NST) & 1)", Deadlock, way=_MBARRIERS),
    Change("wrong_number_of_threads", "common", "bar.arrive $1, 288", "bar.arrive $1, 320", RuntimeError),
    Change("mask_off_by_one", "common", "gl.minimum(position + right, last)", "gl.minimum(position + right + 1, last)",
           case=_CAUSAL),
    Change("rows_not_cleared", "common", "if (i * 16 < lo) | (i * 16 + 16 > hi):", "if False:", case=_VARLEN),
    Change("barriers_left_half_full", "producer", "if i < blocks_before:", "if False:", RuntimeError),
    Change("wrong_bytes", "producer", "k.block_type.nbytes + v.block_type.nbytes", "k.block_type.nbytes",
           _EITHER),
    Change("q_released_early", "backward", *_swap(
        "    if NEED_DK:\n"
        "        dk, near_ds16, far_ds16 = warpgroup_mma_wait(0, deps=[dk_token, near_ds16, far_ds16])\n",
        "    release(q_empty, stage, 5, 2, NAMED)\n",
    ), RuntimeError, case=_case("rows", 600, 100, heads=1)),
    Change("ds_not_awaited", "backward", "        _await_scores(ds_full, it - 1, WG, NAMED)\n        dq_token",
           "        dq_token", _EITHER, way=_MBARRIERS),
    Change("ds_not_fenced", "backward", "        fence_async_shared()\n        _announce", "        _announce",
           RuntimeError),
    Change("dq_overwritten", "backward", "        tma.store_wait(0)\n        staged", "        staged", way=_BULK),
    Change("dk_overwritten_by_dv", "backward", "            if NEED_DQ and BULK:", "            if False:", way=_BULK),
    Change("dk_overwritten_by_next", "backward", "tma.store_wait(0)  # those of the tile before", "pass",
           case=_case("keys", 70, 600)),
    Change("wrong_columns", "backward", "[batch_row, row, h, WG * WIDTH]", "[batch_row, row, h, 0]", way=_BULK),
    Change("address_off", "backward", "columns % 8 // 2 * 4", "columns % 8 // 2 * 2", RuntimeError),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, **by_name)
def test_a_change_of_a_kernel_is_noticed(emulated, monkeypatch, tmp_path, change):
    _make(change, monkeypatch, tmp_path)
    _expect_failure(emulated, change)


def _make(change: Change, monkeypatch, folder) -> None:
    original = sys.modules[f"{fa3.__name__}.{change.module}"]
    source = inspect.getsource(original)
    assert change.old in source
    path = folder / f"{change.module}.py"
    path.write_text(source.replace(change.old, change.new))
    spec = importlib.util.spec_from_file_location(f"{original.__name__}_changed", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    for module in (fa3, *(sys.modules[f"{fa3.__name__}.{name}"] for name in ("forward", "backward", "producer"))):
        for name, value in list(vars(module).items()):
            if hasattr(value, "fn") and value is vars(original).get(name):
                monkeypatch.setattr(module, name, getattr(changed, name))


def _expect_failure(emulated, change: Change) -> None:
    _reference(change.case)
    with pytest.raises(change.error):
        for seed in range(8):
            emulated.counter.zero_()
            emulated.names.clear()
            emulated.check(change.case, replace(change.way, options=_at_random(seed)))


def test_writes_that_are_not_awaited_are_noticed(emulated, monkeypatch, tmp_path):
    """Of a tile that is sent again: the first result may come after the second."""
    _make(
        Change("", "forward", "                    await_writes()", "                    pass"), monkeypatch, tmp_path
    )
    q, k, v = _prepared(BY_NAME["plain"])[0][:3]
    k = k * torch.linspace(100, 0, 256, dtype=F16)[:, None, None]
    emulated.way = RANDOM
    out, _ = emulated.attention(q, k, v, return_lse=True)
    with pytest.raises(AssertionError):
        testing.assert_close(out, reference.attention(q, k, v), testing.naive_attention(q, k, v))


def test_a_wrong_stride_is_noticed(emulated):
    def alter(record):
        k = record.descriptors["k"]
        record.descriptors["k"] = replace(k, strides=(*k.strides[:1], k.strides[1] - 8, *k.strides[2:]))
        return record

    emulated.alter = alter
    with pytest.raises(AssertionError):
        emulated.check(BY_NAME["plain"], EAGER)


def test_an_address_outside_a_tensor_is_noticed(emulated):
    def alter(record):
        record.tensors["lse"] = record.tensors["lse"].flatten()[:-1]
        return record

    emulated.alter = alter
    with pytest.raises(IndexError):
        emulated.check(BY_NAME["plain"], EAGER)


def test_a_deadlock_says_who_waits_for_what(emulated, monkeypatch, tmp_path):
    (change,) = (change for change in CHANGES if change.name == "one_arrival_too_many_to_wait_for")
    _make(change, monkeypatch, tmp_path)
    with pytest.raises(Deadlock, match=r"partition 2 waits for parity 0 of k_empty\[0\] \(0 phases ended; 1 arrivals"):
        emulated.check(change.case, replace(change.way, options={}))
