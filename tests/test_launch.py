"""Launch records: argument order, their identity, and what they are specialised on when lowered without a GPU."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if target.interpreting():
    pytest.skip("lowers kernels, which Triton's interpreter cannot", allow_module_level=True)

import triton
import triton.language as tl

from speedlight import launch
from speedlight.launch import Launch
from speedlight.target import Target

SM80, GFX942 = Target.parse("sm_80"), Target.parse("gfx942")


@triton.jit(do_not_specialize=["free"])
def _kernel(
    x, y, flag, stride_x, length, free, scale, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs * stride_x, mask=offs < length, other=0.0).to(tl.float32) * scale + free
    if flag is not None:
        value += tl.load(flag)
    if CAUSAL:
        value += HEAD_DIM
    tl.store(y + offs, value.to(y.dtype.element_ty), mask=offs < length)


def record(x_dtype=torch.float32, y_dtype=torch.float32, flag=False, **changed) -> Launch:
    x, y = torch.empty(64, dtype=x_dtype, device="meta"), torch.empty(64, dtype=y_dtype, device="meta")
    args = dict(stride_x=16, length=64, free=16, scale=0.5, HEAD_DIM=8, CAUSAL=True, BLOCK=32) | changed
    tensors = {"x": x, "y": y} | ({"flag": torch.empty(1, device="meta")} if flag else {})
    return Launch(_kernel, (2,), tensors, args, num_warps=2, num_stages=1)


# Records


def test_bound_puts_arguments_in_the_kernels_order_however_they_were_given():
    one = record()
    shuffled = dict(reversed(one.args.items()))
    other = Launch(_kernel, one.grid, one.tensors, shuffled, 2, 1)
    assert one.bound() == [one.tensors["x"], one.tensors["y"], None, 16, 64, 16, 0.5, 8, True, 32]
    assert other.bound() == one.bound()


@pytest.mark.parametrize("name", ["length", "HEAD_DIM"])
def test_a_missing_argument_is_named(name):
    launch_ = record()
    del launch_.args[name]
    with pytest.raises(AssertionError, match=name):
        launch_.bound()


def test_tensors_that_the_kernel_does_not_take_are_left_alone():
    """The launches of one pass share their tensors."""
    launch_ = record()
    bound = launch_.bound()
    launch_.tensors["delta"] = torch.empty(1, device="meta")
    assert launch_.bound() == bound


def test_a_surplus_argument_is_named():
    with pytest.raises(AssertionError, match="BLOCK_M"):
        record(BLOCK_M=3).bound()


def test_a_renamed_argument_is_not_taken_for_another():
    launch_ = record()
    launch_.args["LENGTH"] = launch_.args.pop("length")
    with pytest.raises(AssertionError, match="LENGTH"):
        launch_.bound()


def test_options_reach_the_compiler():
    launch_ = record()
    launch_.options["maxnreg"] = 64
    assert launch_.meta() == {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True, "maxnreg": 64}
    compiled = launch.lower(launch_, SM80)
    assert compiled.metadata.num_warps == 2
    assert compiled.metadata.num_stages == 1
    assert compiled.metadata.maxnreg == 64
    assert ".maxnreg 64" in compiled.asm["ptx"] or ".maxnreg\t64" in compiled.asm["ptx"]


@pytest.fixture
def driver(monkeypatch):
    """A stand-in for a device and its compiled kernels: ``compiled`` receives the tensors of launches through Triton,
    ``calls`` the arguments of repeated ones."""
    calls, compiled = [], []
    kernel = SimpleNamespace(run=lambda *a: calls.append(a), function="function", packed_metadata="metadata")

    class Kernel:
        arg_names = _kernel.arg_names

        def __getitem__(self, grid):
            return lambda *tensors, **args: compiled.append((grid, tensors, args)) or kernel

    def build(**tensors):
        launch_ = record()
        launch_.kernel, launch_.tensors = Kernel(), tensors
        return launch_

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: ("stream", index), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(launch, "_PLANS", {})
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    return SimpleNamespace(calls=calls, compiled=compiled, build=build)


GPU = torch.device("cuda", 0)
REST = (16, 64, 16, 0.5, 8, True, 32)


def test_a_repeated_launch_is_what_it_was_made_for(driver):
    """Straight to the driver, in the order of Triton's own launcher, with the tensors' addresses."""

    def run():
        x, y = torch.ones(4), torch.ones(4)
        launch.run("key", GPU, {"x": x, "y": y}, lambda: driver.build(x=x, y=y))
        return x, y

    run()
    x, y = run()
    [(grid, tensors, args)] = driver.compiled
    assert (grid, tensors[2]) == ((2,), None)
    assert args == record().args | record().meta()
    fixed = (2, 1, 1, ("stream", 0), "function", "metadata", None, None, None)
    assert driver.calls == [(*fixed, x.data_ptr(), y.data_ptr(), None, *REST)]


def test_a_plan_gives_each_kernel_its_own_tensors(driver):
    """By name, not by identity: tensors that were one object at first may be two later."""
    other = driver.build()
    other.kernel.arg_names = ["delta", "y", *other.args]

    def build(**tensors):
        launch_ = driver.build(**tensors)
        second = Launch(other.kernel, (2,), tensors, other.args, 2, 1)
        return [launch_, second]

    one = torch.ones(4)
    launch.run("key", GPU, {"y": one, "x": one, "delta": one}, lambda: build(y=one, x=one, delta=one))
    a, b, c = (torch.ones(4) for _ in range(3))
    launch.run("key", GPU, {"y": a, "x": b, "delta": c}, lambda: pytest.fail("built again"))
    first, second = driver.calls
    assert first[9:] == (b.data_ptr(), a.data_ptr(), None, *REST)
    assert second[9:] == (c.data_ptr(), a.data_ptr(), *REST)


def test_a_plan_keeps_no_tensor_alive(driver):
    x = torch.ones(4)
    gone = weakref.ref(x)
    launch.run("key", GPU, {"x": x, "y": x}, lambda x=x: driver.build(x=x, y=x))
    driver.compiled.clear()
    del x
    gc.collect()
    assert gone() is None


def test_a_profilers_hook_sees_every_launch(driver, monkeypatch):
    """With a launch hook set, the launch goes through Triton, which calls the hook."""
    x, y = torch.ones(4), torch.ones(4)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])

    def run():
        launch.run("key", GPU, {"x": x, "y": y}, lambda: driver.build(x=x, y=y))

    for n in range(3):
        run()
        assert (len(driver.compiled), driver.calls) == (n + 1, [])


def test_run_compiles_once_per_key_and_alignment(driver):
    """Triton specialises on a pointer's alignment, so one prepared launch must not serve both."""
    memory = torch.zeros(68)
    aligned, odd = memory[:64], memory[1:65]
    assert aligned.data_ptr() % 16 == 0
    assert odd.data_ptr() % 16 == 4

    def run(key, x, y):
        launch.run(key, GPU, {"x": x, "y": y}, lambda: driver.build(x=x, y=y))
        return len(driver.compiled), len(driver.calls)

    assert run("a", aligned, aligned) == (1, 0)
    assert run("a", aligned, aligned) == (1, 1)
    assert run("b", aligned, aligned) == (2, 1)
    assert run("a", odd, aligned) == (3, 1)
    assert run("a", aligned, odd) == (4, 1)
    assert run("a", odd, aligned) == (4, 2)
    assert driver.calls[-1][9:12] == (odd.data_ptr(), aligned.data_ptr(), None)


# TMA descriptors


class Launcher:
    """Triton's launcher of a kernel with descriptors: what it is given is kept in ``calls``, what reaches the launcher
    below it, which takes encoded descriptors, in ``raw``."""

    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, scratch=0):
        self.calls, self.raw = [], []
        self.global_scratch_size = self.profile_scratch_size = scratch
        launcher = lambda *arguments: self.raw.append(arguments)  # noqa: E731
        self.launch = lambda *arguments: launcher(*arguments)

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.fixture
def tma(driver, monkeypatch):
    """As ``driver``, for a launch whose x goes by a descriptor."""
    encoded = []

    def encode(address, *how):
        encoded.append((address, *how))
        return f"map of {address}"

    def build(scratch=0, **tensors):
        launch_ = driver.build(**tensors)
        launch_.descriptors = {"x": launch.Descriptor("x", (4, 16), (16, 1), (2, 16))}
        meta = dict(swizzle=1, elem_size=2, elem_type=10, block_size=[2, 16])
        compiled = SimpleNamespace(
            run=Launcher(scratch), function="function", packed_metadata="metadata",
            metadata=SimpleNamespace(tensordesc_meta=[meta]),
        )  # fmt: skip
        return launch_, compiled

    utils = SimpleNamespace(fill_tma_descriptor=encode)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    return SimpleNamespace(build=build, encoded=encoded)


ORDER = ["y", "x"]


def _aligned(n):
    return torch.ones(n, 16, dtype=torch.bfloat16), torch.ones(n, dtype=torch.float32)


def test_a_descriptor_is_encoded_once_for_each_address(tma, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    x, y = _aligned(4)
    launch_, compiled = tma.build(x=x, y=y)
    prepared = launch.Prepared(launch_, compiled, ORDER)
    for addresses in ((16, 64, None), (16, 128, None), (32, 64, None), (16, 64, None)):
        prepared("stream", addresses)
    assert [call[0] for call in tma.encoded] == [64, 128]
    assert tma.encoded[0][1:] == (1, 2, 9, [2, 16], [4, 16], [16, 1], 0)  # Triton's number for bf16 is not the driver's
    assert compiled.run.calls == []
    fixed = (2, 1, 1, "stream", "function", False, True, None, None, "metadata", None, None, None)
    for n, (at_y, at_x) in enumerate(((16, 64), (16, 128), (32, 64), (16, 64))):
        assert compiled.run.raw[n] == (*fixed, f"map of {at_x}", 4, 16, 16, 1, at_y, None, *REST)


@pytest.mark.parametrize(("version", "scratch"), [("3.9.0", 0), ("3.6.0", 8)])
def test_where_the_launcher_is_not_known_triton_encodes(tma, monkeypatch, version, scratch):
    monkeypatch.setattr(triton, "__version__", version)
    x, y = _aligned(4)
    launch_, compiled = tma.build(scratch, x=x, y=y)
    prepared = launch.Prepared(launch_, compiled, ORDER)
    prepared("stream", (16, 64, None))
    prepared("stream", (32, 128, None))
    assert tma.encoded == [] and compiled.run.raw == []
    for arguments, (at_y, at_x) in zip(compiled.run.calls, ((16, 64), (32, 128)), strict=True):
        assert arguments[:9] == (2, 1, 1, "stream", "function", "metadata", None, None, None)
        descriptor = arguments[9]
        assert descriptor.base.data_ptr() == at_x
        seen = descriptor.shape, descriptor.strides, descriptor.block_shape
        assert tuple(map(list, seen)) == ([4, 16], [16, 1], [2, 16])
        assert arguments[10:] == (at_y, None, *REST)


def test_only_so_many_encoded_descriptors_are_kept(tma, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(launch, "_MAPS_LIMIT", 3)
    x, y = _aligned(4)
    launch_, compiled = tma.build(x=x, y=y)
    prepared = launch.Prepared(launch_, compiled, ORDER)
    for address in (16, 32, 48, 64, 64):
        prepared("stream", (16, address, None))
    assert [len(known) for _, encoder, known in prepared.take.slots if encoder] == [1]
    assert list(prepared.take.known) == [(16, 64, None)]
    assert [call[0] for call in tma.encoded] == [16, 32, 48, 64]


# Lowering


def signature(compiled) -> dict[str, str]:
    """Type of each parameter that is left in the generated function, read from the first IR."""
    line = next(line for line in compiled.asm["ttir"].splitlines() if "tt.func public" in line)
    found = {}
    for parameter in line.split("(", 1)[1].split("%")[1:]:
        name, kind = parameter.split(":", 1)
        kind = kind.split(" loc(")[0].strip().rstrip(",) ")
        found[name.strip()] = kind
    return found


def test_types_of_parameters():
    compiled = launch.lower(record(torch.bfloat16, torch.float16, flag=True, length=2**31, free=3), SM80)
    found = signature(compiled)
    assert list(found) == ["x", "y", "flag", "stride_x", "length", "free", "scale"]
    assert found["x"].startswith("!tt.ptr<bf16>")
    assert found["y"].startswith("!tt.ptr<f16>")
    assert found["flag"].startswith("!tt.ptr<f32>")
    assert found["length"].startswith("i64")
    assert found["free"] == "i32"
    assert found["scale"] == "f32"


def test_none_and_constexpr_leave_no_parameter():
    assert list(signature(launch.lower(record(), SM80))) == ["x", "y", "stride_x", "length", "free", "scale"]


def test_specialisation_is_that_of_a_launch():
    """Divisibility by 16 is known of pointers and specialised integers; 1 is a constant; a free integer is neither."""
    found = signature(launch.lower(record(), SM80))
    for name in ("x", "y", "stride_x", "length"):
        assert "tt.divisibility = 16" in found[name], name
    assert "divisibility" not in found["free"]
    found = signature(launch.lower(record(stride_x=1, length=40, free=1), SM80))
    assert "stride_x" not in found
    assert found["length"] == "i32"
    assert found["free"] == "i32"


@pytest.mark.parametrize(("gpu", "binary"), [(SM80, "cubin"), (GFX942, "hsaco")], ids=str)
def test_the_same_record_is_lowered_for_any_gpu(gpu, binary):
    compiled = launch.lower(record(), gpu)
    assert len(compiled.asm[binary]) > 0
    assert compiled.metadata.target.arch == gpu.arch
    assert compiled.metadata.target.warp_size == (64 if gpu is GFX942 else 32)


def test_constants_are_part_of_the_code():
    on, off = (launch.lower(record(CAUSAL=causal), SM80).asm["ttir"] for causal in (True, False))
    assert "8.000000e+00" in on
    assert "8.000000e+00" not in off
