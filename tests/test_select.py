"""Which backend serves a problem, told for any device by name, and what ``explain`` says about it."""

from __future__ import annotations

import dataclasses
import warnings
from types import ModuleType

import pytest
import torch

import speedlight
from speedlight import UnsupportedError, explain, select, target
from speedlight.problem import describe
from speedlight.select import AUTOMATIC, BACKENDS, choose, choose_for
from speedlight.target import Target

TRITON = pytest.mark.skipif(target.triton_problem() is not None, reason="needs Triton")
GPUS = tuple(Target.parse(name) for name in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"))
TORCH = Target("torch")


def problem(dtype=torch.float16, **options):
    q, k, v = (torch.empty(2, 64, heads, 32, dtype=dtype, device="meta") for heads in (4, 2, 2))
    return describe(q, k, v, **options)[0]


@pytest.fixture
def backends(monkeypatch):
    """Stand-ins for the backend modules: ``backends["fa2"] = "reason"`` refuses, None serves."""
    refusals = dict.fromkeys(BACKENDS)

    def load(name, target):
        module = ModuleType(name)
        module.supports = lambda problem, target: refusals[name]
        module.describe_tile = lambda problem, target: f"{name}'s tile"
        return module, None

    monkeypatch.setattr(select, "load", load)
    monkeypatch.setattr(select, "_CHOICES", {})
    return refusals


# Order


def test_the_fastest_backend_comes_first_and_the_one_for_study_is_not_chosen(backends):
    assert AUTOMATIC == ("fa3", "fa2", "cpu")
    for gpu in GPUS:
        choice = choose_for(problem(), gpu, None)
        assert (choice.name, choice.refused) == ("fa3", ())


def test_what_one_refuses_the_next_one_serves(backends):
    backends["fa3"] = "too old"
    choice = choose_for(problem(), GPUS[0], None)
    assert (choice.name, choice.module.__name__) == ("fa2", "fa2")
    assert choice.refused == (("fa3", "too old"),)
    backends["fa2"] = "too wide"
    choice = choose_for(problem(), GPUS[0], None)
    assert (choice.name, choice.module.__name__) == ("cpu", "cpu")
    assert choice.refused == (("fa3", "too old"), ("fa2", "too wide"))


def test_without_triton_only_torch_operations_are_left():
    choice = choose_for(problem(), TORCH, None)
    assert choice.name == "cpu"
    assert [name for name, _ in choice.refused] == ["fa3", "fa2"]
    assert all("Triton" in reason for _, reason in choice.refused)


# Asked means asked


@pytest.mark.parametrize("name", BACKENDS)
def test_the_one_asked_for_is_used(backends, name):
    for other in BACKENDS:
        backends[other] = None if other == name else "another one was asked for"
    assert choose_for(problem(), GPUS[0], name).name == name


@pytest.mark.parametrize("name", BACKENDS)
def test_the_one_asked_for_raises_rather_than_being_replaced(backends, name):
    backends[name] = "it is Tuesday"
    with pytest.raises(UnsupportedError, match=rf"sm_80 \({name}: it is Tuesday\)"):
        choose_for(problem(), Target.parse("sm_80"), name)


def test_when_all_refuse_every_reason_is_given(backends):
    backends.update(fa3="first reason", fa2="second reason", cpu="third reason", fa1="never asked")
    with pytest.raises(UnsupportedError) as caught:
        choose_for(problem(), Target.parse("gfx942"), None)
    reasons = "fa3: first reason; fa2: second reason; cpu: third reason"
    assert str(caught.value) == f"no backend can serve this problem on gfx942 ({reasons})"
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("name", ["fa4", "FA2", "", "auto"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match=rf"backend must be one of .*fa2.* got '{name}'"):
        choose_for(problem(), TORCH, name)
    with pytest.raises(ValueError, match="backend must be one of"):
        speedlight.attention(q, q, q, backend=name)


@pytest.mark.parametrize("name", ["fa1", "fa2", "fa3"])
def test_kernels_asked_for_on_a_device_without_triton_say_what_is_missing(name, monkeypatch):
    with pytest.raises(UnsupportedError, match=rf"on torch \({name}: .*Triton"):
        choose_for(problem(), TORCH, name)
    monkeypatch.setattr(select, "triton_problem", lambda: "Triton 9.9 is installed; Speedlight supports less")
    with pytest.raises(UnsupportedError, match=r"Triton 9\.9 is installed"):
        choose_for(problem(), TORCH, name)


# The real backends, on every target by name


@TRITON
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_half_precision_runs_on_fa3_on_hopper_and_on_fa2_elsewhere(gpu, monkeypatch):
    from speedlight.backends import fa3

    monkeypatch.setattr(fa3, "unverified", lambda: None)
    for options in (dict(), dict(causal=True), dict(window=(5, 3)), dict(softcap=3.0)):
        choice = choose_for(problem(**options), gpu, None)
        if str(gpu) == "sm_90":
            assert choice.name == "fa3"
        else:
            assert choice.name == "fa2"
            assert "Hopper" in dict(choice.refused)["fa3"]
            with pytest.raises(UnsupportedError, match="Hopper"):
                choose_for(problem(**options), gpu, "fa3")


@TRITON
def test_fa3_waits_for_versions_of_triton_that_ran_it(monkeypatch):
    import triton

    hopper = Target.parse("sm_90")
    monkeypatch.setattr(triton, "__version__", "3.9.9")
    with pytest.raises(UnsupportedError, match=r"3\.9\.9"):
        choose_for(problem(), hopper, "fa3")
    assert choose_for(problem(), hopper, None).name == "fa2"
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert choose_for(problem(), hopper, None).name == "fa3"


@TRITON
def test_fa3_takes_16_bit_inputs():
    hopper = Target.parse("sm_90")
    with pytest.raises(UnsupportedError, match="float32"):
        choose_for(problem(torch.float32), hopper, "fa3")
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        choose_for(problem(alibi_slopes=torch.empty(4, device="meta")), hopper, "fa3")


@TRITON
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_float64_is_left_to_torch_operations(gpu):
    choice = choose_for(problem(torch.float64), gpu, None)
    assert choice.name == "cpu"
    assert "float64" in dict(choice.refused)["fa2"]
    for name in ("fa1", "fa2"):
        with pytest.raises(UnsupportedError, match="float64"):
            choose_for(problem(torch.float64), gpu, name)


@TRITON
def test_bfloat16_is_refused_on_turing_only():
    for gpu in GPUS:
        choice = choose_for(problem(torch.bfloat16), gpu, None)
        assert (choice.name == "cpu") == (str(gpu) == "sm_75")
    assert "bfloat16" in dict(choose_for(problem(torch.bfloat16), GPUS[0], None).refused)["fa2"]


@TRITON
def test_head_dimensions_beyond_the_tiles_are_refused_with_both_sizes():
    wide = dataclasses.replace(problem(), head_dim=1100, head_dim_v=40)
    for name in ("fa1", "fa2"):
        with pytest.raises(UnsupportedError, match="1100"):
            choose_for(wide, Target.parse("sm_90"), name)
    assert choose_for(wide, Target.parse("sm_90"), None).name == "cpu"


# One choice per problem, and one warning


def test_a_choice_is_remembered_per_request(monkeypatch):
    calls = []
    monkeypatch.setattr(select, "_CHOICES", {})
    monkeypatch.setattr(select, "choose_for", lambda *args: calls.append(args) or choose_for(*args))
    p = describe(*[torch.zeros(1, 3, 1, 4)] * 3)[0]
    first = choose(p, None)
    assert choose(p, None) is first
    assert choose(p, "cpu") is not first
    assert [args[2] for args in calls] == [None, "cpu"]
    assert calls[0][1] == target.target_of(p.device)


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(select, "_CHOICES", {})
    monkeypatch.setattr(select, "_CHOICES_LIMIT", 2)
    for n in range(1, 6):
        p = describe(*[torch.zeros(1, n, 1, 4)] * 3)[0]
        assert choose(p, "cpu").name == "cpu"
        assert len(select._CHOICES) <= 2


def test_a_gpu_served_by_torch_operations_warns_once_per_reason(monkeypatch, backends):
    """With the target looked up by name: no GPU is needed to be told about one."""
    monkeypatch.setattr(select, "_CHOICES", {})
    monkeypatch.setattr(select, "_warned", set())
    monkeypatch.setattr(select, "target_of", lambda device: Target.parse("sm_80"))
    cuda = [dataclasses.replace(problem(softcap=n), device=torch.device("cuda", 0)) for n in (1.0, 2.0, 3.0)]
    backends.update(fa3="too old", fa2="too wide")
    with pytest.warns(UserWarning, match=r"`cpu` backend.*slow \(fa3: too old; fa2: too wide; said once\)") as caught:
        assert choose(cuda[0], None).name == "cpu"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(cuda[0], None)
        choose(cuda[1], None)
        choose(cuda[1], "cpu")  # asked for: no surprise
        choose(problem(), None)  # not a GPU
    backends["fa2"] = "too narrow"
    with pytest.warns(UserWarning, match="too narrow"):
        choose(cuda[2], None)


# explain


def inputs(varlen=False, **options):
    q, k, v = (torch.zeros(2, n, h, 8) for n, h in ((5, 4), (7, 2), (7, 2)))
    if not varlen:
        return (q, k, v), options
    cu = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
    return (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *cu, 5, 7), options


@pytest.mark.parametrize("varlen", [False, True])
def test_explain_names_the_backend_its_tile_and_why_not_the_others(varlen):
    args, options = inputs(varlen, causal=True, dropout_p=0.1, return_lse=True)
    found = explain(*args, **options)
    assert found.problem.varlen is varlen
    assert found.problem.causal and found.problem.dropout_threshold
    assert found.target == target.target_of(torch.device("cpu"))
    assert set(found.refused) == set(BACKENDS) - {found.backend}
    assert all(found.refused.values())
    lines = str(found).splitlines()
    assert lines[0] == f"{found.backend} on {found.target}, {found.tile}"
    assert lines[1:] == [f"  not {name}: {reason}" for name, reason in found.refused.items()]


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_explain_of_every_backend_asked_for(backends, name, varlen):
    args, options = inputs(varlen, backend=name)
    found = explain(*args, **options)
    assert (found.backend, found.tile) == (name, f"{name}'s tile")
    assert found.refused == {other: f"backend={name!r} was asked for" for other in BACKENDS if other != name}


def test_explain_tells_a_refusal_from_a_lower_place(backends):
    args, _ = inputs()
    asked = "runs only when asked for"
    lower = "could serve this problem, but fa3 comes first"
    assert explain(*args).refused == {"fa2": lower, "cpu": lower, "fa1": asked}
    select._CHOICES.clear()
    backends.update(fa3="too old", fa2="too wide")
    found = explain(*args)
    assert found.backend == "cpu"
    assert found.refused == {"fa3": "too old", "fa2": "too wide", "fa1": asked}


def test_explain_raises_what_the_call_would():
    args, _ = inputs()
    with pytest.raises(ValueError, match="window"):
        explain(*args, window=(-1, 0))
    with pytest.raises(ValueError, match="backend must be one of"):
        explain(*args, backend="fa9")
    with pytest.raises(TypeError, match="softmax_scal"):
        explain(*args, softmax_scal=1.0)
    if target.target_of(torch.device("cpu")) == TORCH:
        with pytest.raises(UnsupportedError, match="fa2"):
            explain(*args, backend="fa2")


# Targets by name


@pytest.mark.parametrize("name", ["sm_75", "sm_90", "sm_100", "gfx942", "interpreter", "torch"])
def test_names_of_targets_are_read_as_they_are_written(name):
    assert str(Target.parse(name)) == name
    assert Target.parse(name).is_gpu == name.startswith(("sm_", "gfx"))


@pytest.mark.parametrize("name", ["sm90", "sm_", "sm_9x", "cuda", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=f"unknown target {name!r}"):
        Target.parse(name)


def test_shared_memory_of_a_program():
    kib = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64,
           "gfx950": 160, "sm_61": 99}  # fmt: skip
    assert {name: Target.parse(name).shared_memory // 1024 for name in kib} == kib


@pytest.mark.parametrize(("version", "good"), [
    ("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.0", False),
])  # fmt: skip
def test_supported_triton_versions(version, good, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    reason = target.triton_problem.__wrapped__()
    assert (reason is None) == good
    assert good or (version in reason and ">=3.6,<3.10" in reason)


def test_missing_triton_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install speedlight[triton]" in target.triton_problem.__wrapped__()
