"""The benchmark on CPU with tiny cases: its rows, its gate, its statistics and its reports."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from dataclasses import replace
from functools import partial
from statistics import median

import pytest
import torch

from speedlight import io_model
from speedlight.bench import baselines, gate, measure, record, report, timing
from speedlight.bench.__main__ import main
from speedlight.bench.cases import PACKED_LENGTHS, Case, select
from speedlight.bench.gate import Gate
from speedlight.bench.interface import Implementation
from speedlight.bench.timing import Contender, Samples

needs_rich = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="needs rich")
TINY = select(["tiny/causal"])[0].resolved("cpu", None)


class Plain(Implementation):
    """Eager attention with a defect put in by ``spoil(out, q, k, v)``, or none."""

    def __init__(self, name, spoil=None, ours=True):
        self.name, self.ours, self.spoil = name, ours, spoil

    def make(self, case):
        attn = baselines.Eager().make(case)
        return attn if self.spoil is None else lambda q, k, v: self.spoil(attn(q, k, v), q, k, v)


@pytest.fixture
def contenders(monkeypatch):
    """Puts implementations into the list that the command line knows."""

    def add(*each):
        for implementation in each:
            monkeypatch.setitem(baselines.IMPLEMENTATIONS, implementation.name, implementation)

    return add


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """The problems are tiny, and other workers want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


def run(tmp_path, *arguments):
    out = tmp_path / "rows.jsonl"
    code = main(["run", *arguments, "--device", "cpu", "--out", str(out)])
    return code, record.read_rows(out)


# --- cases


def test_names_select():
    grid = select(["grid"])
    assert len(grid) == 24 and {c.head_dim for c in grid} == {64, 128}
    assert len(select(["grid/d256"])) == 12
    assert [c.name for c in select(["grid/d64/causal/s4096"])] == ["grid/d64/causal/s4096"]
    assert {c.head_dim for c in select(["grid/*/full/s512"])} == {64, 128, 256}
    assert select(["gqa", "gqa/h32x8"]) == select(["gqa"])
    with pytest.raises(ValueError, match="no case matches 'grdi'"):
        select(["grdi"])


def test_the_grid_is_fa3s_setting():
    for case in select(["grid", "grid/d256"]):
        assert case.batch * case.seqlen == 16384 and case.num_heads * case.head_dim == 2048
        assert case.dtype is torch.bfloat16
    assert sum(PACKED_LENGTHS) == 16384 and len(PACKED_LENGTHS) == 16
    (window,) = select(["window"])
    # 1024 keys for every query that has so many before it
    assert io_model.total_pairs(window.workload()) == 16 * (1024 * 1025 // 2 + (16384 - 1024) * 1024)


def test_a_gpu_case_says_so_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="is for a GPU"):
        select(["long"])[0].resolved(None, None)
    assert select(["tiny/full"])[0].resolved(None, "bf16").device == "cpu"


# --- rows, end to end


def test_rows_hold_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_COMMIT", "abc123")
    code, rows = run(
        tmp_path, "tiny/causal", "tiny/gqa", "--impl", "eager,sdpa", "--rounds", "3", "--calls", "2", "--seed", "5"
    )
    assert code == 0
    assert {(r["case"], r["impl"], r["pass"]) for r in rows} == {
        (c, i, p) for c in ("tiny/causal", "tiny/gqa") for i in ("eager", "sdpa") for p in ("fwd", "bwd")
    }
    cells = report.measured(rows)
    for row in rows:
        assert row["status"] == "ok" and row["dtype"] == "float32" and row["mode"] == "timed"
        pairs = 2 * row["num_heads"] * 96 * 97 // 2
        q, kv = 2 * 96 * row["num_heads"] * 32 * 4, 2 * 96 * row["num_heads_kv"] * 32 * 4
        lse = 2 * 96 * row["num_heads"] * 4
        flops = (4 if row["pass"] == "fwd" else 10) * pairs * 32
        moved = (2 * q + 2 * kv if row["pass"] == "fwd" else 4 * q + 4 * kv) + lse
        assert row["tflops"] == pytest.approx(flops / row["median_ms"] / 1e9)
        assert row["gbps"] == pytest.approx(moved / row["median_ms"] / 1e6)
        assert row["rounds"] == len(row["round_ms"]) == 3 and row["calls"] == 6
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert min(row["round_ms"]) - 1e-6 <= row["median_ms"] <= max(row["round_ms"]) + 1e-6
        base = cells[record.cell({**row, "impl": "sdpa"})]
        paired = [b / x for b, x in zip(base["round_ms"], row["round_ms"], strict=True)]
        assert row["baseline"] == "sdpa" and row["ratio"] == pytest.approx(median(paired), rel=1e-3)
        assert set(row["gate"]) == {"out", "dq", "dk", "dv"}
        assert all(0 < e["l2"] < 1e-5 for e in row["gate"].values())
        env = row["env"]
        assert env["commit"] == "abc123" and env["torch"] == torch.__version__ and env["seed"] == 5
        assert env["command"].endswith("--device cpu --out rows.jsonl")


def test_every_mode_and_mask(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "host_times", partial(timing.host_times, batches=3, calls=5))
    code, rows = run(
        tmp_path, "tiny/window", "tiny/varlen", "tiny/full", "tiny/host", "--impl", "eager,sdpa", "--rounds", "2"
    )
    assert code == 0
    host = [r for r in rows if r["case"] == "tiny/host"]
    assert {r["pass"] for r in host} == {"fwd", "fwdbwd"} and len(host) == 4
    for row in host:
        assert row["host_us"] == pytest.approx(1e3 * row["median_ms"]) and row["tflops"] is None
    skipped = {(r["case"], r["impl"]): r["reason"] for r in rows if r["status"] == "skipped"}
    assert set(skipped) == {("tiny/window", "sdpa"), ("tiny/varlen", "sdpa")}
    packed = next(r for r in rows if r["case"] == "tiny/varlen" and r["pass"] == "fwd")
    flops = sum(4 * 2 * n * (n + 1) // 2 * 32 for n in (50, 33, 13))
    assert packed["batch"] == 3 and packed["tflops"] == pytest.approx(flops / packed["median_ms"] / 1e9)
    assert packed["baseline"] is None and packed["ratio"] is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_speedlight_itself(tmp_path, dtype):
    implementation = baselines.IMPLEMENTATIONS["cpu"]
    if implementation.importable():
        pytest.skip(implementation.importable())
    names = ["tiny/full", "tiny/causal", "tiny/gqa", "tiny/window", "tiny/varlen"]
    code, rows = run(tmp_path, *names, "--impl", "cpu", "--rounds", "1", "--calls", "1", "--dtype", dtype)
    assert code == 0 and [r for r in rows if r["status"] != "ok"] == []
    assert len(rows) == 10 and all(r["ours"] for r in rows)


def test_passes_and_time_limit(tmp_path, capsys):
    code, rows = run(tmp_path, "tiny/full", "--impl", "eager", "--passes", "fwd", "--rounds", "1")
    assert code == 0 and [r["pass"] for r in rows] == ["fwd"]
    code = main(["run", "tiny/full", "tiny/causal", "--impl", "eager", "--device", "cpu", "--time-limit", "-1"])
    assert code == 0 and "2 cases not measured: tiny/full tiny/causal" in capsys.readouterr().out
    assert main(["run", "tiny/full", "--impl", "nobody", "--device", "cpu"]) == 2
    assert "unknown implementation nobody" in capsys.readouterr().err


def test_memory_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    code, rows = run(tmp_path, "tiny/memory", "--impl", "eager", "--passes", "fwd")
    assert code == 0 and [(r["pass"], r["status"]) for r in rows] == [("fwd", "ok")]
    # the out tensor is 0.125 MiB, the scores are 1 MiB
    assert 0.1 < rows[0]["peak_mib"] < 40 and rows[0].get("median_ms") is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs the resettable high-water mark of Linux")
def test_process_peak():
    def call():
        big = torch.ones(16 << 20)  # 64 MiB, gone before the call returns
        return big[:8].clone()

    assert timing.process_peak_mib(call) == pytest.approx(64, abs=8)


# --- the gate


def _scaled(out, q, k, v):
    return out * 1.01


def _anticausal(out, q, k, v):
    return baselines.Eager().make(replace(TINY, batch=q.shape[0], seqlen=q.shape[1], causal=False))(q, k, v)


def _hole(out, q, k, v):
    holed = torch.empty_like(out)  # poisoned: what is not written is NaN
    holed[:, :-1] = out[:, :-1]
    return holed


class _WrongDk(torch.autograd.Function):
    """Identity on k whose gradient is 2 % too large."""

    @staticmethod
    def forward(ctx, k):
        return k.clone()

    @staticmethod
    def backward(ctx, dk):
        return 1.02 * dk


class _NanDv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, dv):
        return dv.index_fill(1, torch.tensor([3]), float("nan"))


def _wrong_dk(out, q, k, v):
    return (
        baselines.Eager().make(TINY)(q, _WrongDk.apply(k), v) if q.shape[1] == 96 else _again(q, _WrongDk.apply(k), v)
    )


def _nan_dv(out, q, k, v):
    return _again(q, k, _NanDv.apply(v))


def _again(q, k, v):
    return baselines.Eager().make(replace(TINY, seqlen=q.shape[1]))(q, k, v)


def _broken(out, q, k, v):
    raise RuntimeError("kernel /usr/lib/somewhere/kernel.cu:12 went wrong")


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_scaled, "out has error"), (_anticausal, "out has error"), (_hole, "out has error nan"),
        (_wrong_dk, "dk has error 0.02"), (_nan_dv, "dv has error nan"), (lambda out, *_: out.double(), "float64"),
        (lambda out, *_: out[:, :-1], "RuntimeError"), (_broken, "kernel kernel.cu:12 went wrong"),
    ],
)  # fmt: skip
def test_gate_catches(tmp_path, contenders, spoil, word):
    contenders(Plain("wrong", spoil))
    code, rows = run(tmp_path, "tiny/causal", "--impl", "eager,wrong", "--rounds", "1")
    assert code == 1
    (wrong,) = [r for r in rows if r["impl"] == "wrong"]
    assert wrong["status"] == "failed" and word in wrong["reason"]
    assert "median_ms" not in wrong and "peak_mib" not in wrong
    assert {r["status"] for r in rows if r["impl"] == "eager"} == {"ok"}


def test_gate_judges_peers_without_blaming_us(tmp_path, contenders):
    contenders(Plain("peer", _scaled, ours=False), Plain("right"))
    code, rows = run(tmp_path, "tiny/causal", "--impl", "peer,right", "--rounds", "1", "--passes", "fwd")
    assert code == 0 and [(r["impl"], r["status"]) for r in rows] == [("peer", "failed"), ("right", "ok")]


def test_a_refusal_is_no_failure(tmp_path, contenders):
    def refuse(out, q, k, v):
        raise NotImplementedError("not on this card")

    contenders(Plain("shy", refuse))
    code, rows = run(tmp_path, "tiny/causal", "--impl", "shy")
    assert code == 0 and [(r["status"], r["reason"]) for r in rows] == [("refused", "not on this card")]


def test_full_size_is_checked_too(tmp_path, contenders):
    """Right on the gate's small problem, wrong in the last row of the case's own size."""

    def late(out, q, k, v):
        return out if q.shape[1] != 96 else torch.cat([out[:, :-1], 2 * out[:, -1:]], 1)

    contenders(Plain("late", late))
    code, rows = run(tmp_path, "tiny/causal", "--impl", "late", "--rounds", "1")
    assert code == 1 and [r["status"] for r in rows] == ["failed"] and "at full size" in rows[0]["reason"]


@pytest.mark.parametrize("name", ["tiny/full", "tiny/causal", "tiny/gqa", "tiny/window", "tiny/varlen"])
def test_reference_against_autograd(name):
    """The formulas of the float64 reference against eager attention differentiated by autograd in float64."""
    case = replace(select([name])[0].resolved("cpu", "fp64"), batch=1 if name == "tiny/varlen" else 2)
    inputs = gate.random_inputs(case)
    plain = gate.forward_backward(baselines.Eager().make(case), inputs)
    for x, ref in zip(plain, gate.reference_for(case, inputs), strict=True):
        assert x.shape == ref.shape and gate.relative_error(x, ref) < 1e-14


def test_reference_in_blocks(monkeypatch):
    """Many blocks of rows give what one block gives (batch x heads x seqlen^2 above 2^22)."""
    case = Case("blocks", 1100, 4, 8, dtype=torch.float64, device="cpu", window_left=300)
    inputs = gate.random_inputs(case)
    plain = gate.forward_backward(baselines.Eager().make(case), inputs)
    for x, ref in zip(plain, gate.reference_for(case, inputs), strict=True):
        assert gate.relative_error(x, ref) < 1e-13


def test_gate_verdicts_are_made_once():
    calls = []
    counted = Plain("counted", lambda out, *_: calls.append(1) or out)
    judge = Gate()
    first = judge.check(counted, TINY)
    assert first.status == "passed" and judge.check(counted, replace(TINY, seqlen=64, name="other")) is first
    assert len(calls) == 1
    judge.check(counted, replace(TINY, head_dim=16))
    assert len(calls) == 2


# --- timing


class StepClock:
    """Calls cost what they say, and the order is noted."""

    def __init__(self):
        self.order = []

    def turn(self, call, prepare, calls, lead_s):
        prepare()
        self.order.append(call.__name__)
        assert lead_s == pytest.approx(1.5 * 2e-3 + 50e-6)  # of the slowest host
        return [(call(), 1.0)] * calls


def contender(name, ms, host_s=1e-3, estimate=1.0):
    def call():
        return ms

    call.__name__ = name
    return Contender(name, {"fwd": call}, host_s={"fwd": host_s}, estimate_ms={"fwd": estimate})


def test_turns_rotate():
    a, b, c = contender("a", 1.0), contender("b", 2.0, host_s=2e-3), contender("c", 4.0, estimate=25.0)
    clock = StepClock()
    samples = timing.alternate([a, b, c], clock, rounds=4, calls=3, pause=0.0)
    assert "".join(clock.order) == "abcbcacababc"
    assert samples["a", "fwd"].rounds == [[1.0] * 3] * 4 and samples["b", "fwd"].median == 2.0
    assert samples["c", "fwd"].rounds == [[4.0] * 2] * 4  # 60 ms of turn hold two calls of 25 ms
    assert timing.ratio(samples["a", "fwd"].round_medians, samples["b", "fwd"].round_medians) == 0.5


def test_gpu_clock_by_its_steps(monkeypatch):
    """The device calls of a timed turn in order, with events and kernels replaced by notes: no GPU needed."""
    notes = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            notes.append("event")

        def elapsed_time(self, end):
            assert notes[-1] == "synchronize"
            return 7.0

    class Buffer:
        def zero_(self):
            notes.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: notes.append(f"spin {cycles}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: notes.append("synchronize"))
    clock = object.__new__(timing.CudaClock)
    clock._flush = Buffer()
    times = clock.turn(lambda: notes.append("call"), lambda: notes.append("prepare"), 2, 1e-3)
    assert notes == 2 * ["prepare", "flush", "spin 2000000", "event", "call", "event"] + ["synchronize"]
    assert [ms for ms, _ in times] == [7.0, 7.0] and all(0 <= us < 1e5 for _, us in times)


def test_deadline_leaves_two_rounds_and_a_fault_drops_out():
    def bad():
        raise MemoryError("full")

    a, b = contender("a", 1.0, host_s=2e-3), Contender("b", {"fwd": bad}, host_s={"fwd": 0.0}, estimate_ms={"fwd": 1.0})
    samples = timing.alternate([a, b], StepClock(), rounds=9, calls=1, pause=0.0, deadline=time.monotonic() - 1)
    assert len(samples["a", "fwd"].rounds) == 2 and ("b", "fwd") not in samples
    assert b.fault == "MemoryError: full" and not a.fault


def test_statistics():
    samples = Samples([[1.0, 5.0, 3.0], [2.0, 2.0, 8.0]])
    assert samples.median == 2.5 and samples.round_medians == [3.0, 2.0]
    assert timing.spread([float(n) for n in range(11)]) == (1.0, 9.0)
    assert timing.spread([4.0]) == (4.0, 4.0)
    # per-round quotients 2, 1, 4: the median, which is not the quotient of the medians
    assert timing.ratio([2.0, 3.0, 8.0], [1.0, 3.0, 2.0]) == 2.0


def test_modes_set_grad_mode():
    seen = {}
    calls = {
        name: (lambda name=name: seen.setdefault(name, torch.is_grad_enabled())) for name in ("fwd", "bwd", "fwdbwd")
    }
    timing.host_times([Contender("a", calls)], "cpu", batches=1, calls=1)
    assert seen == {"fwd": False, "bwd": True, "fwdbwd": True}


def test_sustained_is_back_to_back():
    count = []
    each = Contender("a", {"fwd": lambda: count.append(1) or time.sleep(0.001)}, estimate_ms={"fwd": 1.0})
    samples = timing.sustained([each], "cpu", rounds=2, pause=0.0, seconds=0.02)
    assert len(count) == 40 and all(1.0 < ms < 20 for ms in samples["a", "fwd"].all)


# --- records and reports


def test_records(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    recorder = record.Recorder(path, {"torch": "x"})
    recorder.add({"a": 1})
    recorder.add({"a": 2})
    path.write_text(path.read_text() + '{"a": 3, "en')  # killed while writing
    assert record.read_rows(path) == [{"a": 1, "env": {"torch": "x"}}, {"a": 2, "env": {"torch": "x"}}]
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 1"):
        record.read_rows(path)
    line = record.command_line(
        ["run", "grid/d64", "--out", "/home/someone/x.jsonl", "--out=/tmp/y.jsonl", "results/z.jsonl"]
    )
    assert line == "python -m speedlight.bench run grid/d64 --out x.jsonl --out=y.jsonl results/z.jsonl"
    assert record.first_line(RuntimeError("at /opt/venv/lib/x.py:3: no\nmore")) == "at x.py:3: no"


def row(case, impl, ms, name="fwd", env="one", rounds=None, **more):
    return {
        "case": case, "suite": case.split("/")[0], "mode": "timed", "device": "cuda", "dtype": "bfloat16", "impl": impl,
        "ours": impl == "fa2", "pass": name, "status": "ok", "seqlen": int(case.rsplit("s", 1)[1]), "median_ms": ms,
        "p10_ms": 0.99 * ms, "p90_ms": 1.01 * ms, "round_ms": rounds or [ms] * 3, "tflops": 100 / ms,
        "baseline": "sdpa_flash", "env": {"date": "2026-01-02T03:04:05Z", "torch": "2.11", "gpu": "H200", "run": env},
        **more,
    }  # fmt: skip


def test_tables_by_hand():
    rows = [
        row("grid/d64/causal/s512", "fa2", 1.0), row("grid/d64/causal/s512", "sdpa_flash", 2.0),
        row("grid/d64/causal/s1024", "fa2", 4.0, rounds=[4.0, 2.0, 5.0]),
        row("grid/d64/causal/s1024", "sdpa_flash", 2.0, rounds=[2.0, 2.0, 2.0]),
        row("grid/d64/causal/s1024", "flex", 8.0, env="another run", rounds=[1.0, 1.0, 1.0]),
        row("grid/d64/causal/s512", "fa2", 3.0, name="bwd"),
        {**row("grid/d64/causal/s512", "fa1", 1.0), "status": "failed", "reason": "wrong"},
    ]  # fmt: skip
    forward, backward = report.tables(rows)
    assert forward.implementations == ["fa2", "sdpa_flash", "flex"] and forward.unit == "TFLOP/s"
    first, second = forward.entries["grid/d64/causal/s512"], forward.entries["grid/d64/causal/s1024"]
    assert first["fa2"] == report.Entry(100.0, 2.0) and first["sdpa_flash"].ratio == 1.0
    assert second["fa2"].ratio == 0.5  # median of 1/2, 1, 2/5
    assert second["flex"].ratio == 0.25  # another run: medians
    assert forward.geomeans["fa2"] == (pytest.approx(1.0), 2) and forward.geomeans["flex"] == (pytest.approx(0.25), 1)
    assert backward.entries["grid/d64/causal/s512"]["fa2"].ratio is None and backward.geomeans == {}
    assert report.tables(rows, "flex")[0].geomeans["sdpa_flash"] == (pytest.approx(4.0), 1)
    assert report.unmeasured(rows) == ["grid/d64/causal/s512 fa1 failed: wrong"]


def test_comparison_by_hand():
    a = [row(f"grid/d64/full/s{n}", "fa2", 2.0) for n in (512, 1024, 2048, 4096)]
    b = [
        row("grid/d64/full/s512", "fa2", 1.0),
        row("grid/d64/full/s1024", "fa2", 1.96),  # ranges apart, 2 %: noise between two runs
        row("grid/d64/full/s2048", "fa2", 2.5),
        row("grid/d64/full/s4096", "fa2", 1.8, p90_ms=2.1),  # ranges meet
        row("grid/d64/full/s8192", "fa2", 1.0),
    ]
    changes = report.comparison(a, b)
    assert [c.verdict for c in changes] == ["better", "", "worse", ""]
    assert [c.ratio for c in changes] == pytest.approx([2.0, 2 / 1.96, 0.8, 2 / 1.8])
    mean, count = report.comparison_geomeans(changes)["fa2", "fwd", "ms"]
    assert count == 4 and mean == pytest.approx((2.0 * (2 / 1.96) * 0.8 * (2 / 1.8)) ** 0.25)
    memory = [
        {**row("memory/s2048", "fa2", 1.0), "median_ms": None, "peak_mib": m, "p10_ms": None} for m in (100.0, 50.0)
    ]
    (change,) = report.comparison(memory[:1], memory[1:])
    assert (change.unit, change.ratio, change.verdict) == ("MiB", 2.0, "better")


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@needs_rich
def test_reports_are_printed(tmp_path, capsys):
    rows = [
        row(f"grid/d64/causal/s{n}", impl, ms, name)
        for n in (512, 1024)
        for impl, ms in (("fa2", 1.0), ("sdpa_flash", 2.0))
        for name in ("fwd", "bwd")
    ]
    a, b = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[:3])
    assert main(["table", a, "--baseline", "sdpa_flash"]) == 0
    text = capsys.readouterr().out
    assert "grid/d64/causal/s1024" in text and "2.000x of 2" in text and "geomean" in text
    assert main(["compare", a, b]) == 0
    assert "5 cells are in one file only" in capsys.readouterr().out


def test_list_names_everything(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert "grid/d128/causal/s16384" in text and "sdpa_cudnn" in text and "16 packed sequences" in text


def test_chart(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(f"grid/d{d}/causal/s{n}", impl, 1 + n / 1024, name)
        for d in (64, 128)
        for n in (512, 1024, 2048)
        for impl in ("fa2", "sdpa_flash")
        for name in ("fwd", "bwd")
    ]
    out = tmp_path / "chart.svg"
    assert main(["chart", write(tmp_path / "a.jsonl", rows), str(out)]) == 0
    text = out.read_text()
    assert "speedlight fa2" in text and "sequence length" in text and "TFLOP/s" in text
    with pytest.raises(SystemExit, match="no timed case"):
        main(["chart", write(tmp_path / "a.jsonl", rows), str(out), "--cases", "cpu/*"])


def test_missing_helpers_are_named(tmp_path, monkeypatch):
    """The run needs none of them; the reports say what to install."""
    for name in ("rich", "rich.console", "rich.table", "matplotlib", "typer"):
        monkeypatch.setitem(sys.modules, name, None)
    code, rows = run(tmp_path, "tiny/full", "--impl", "eager", "--rounds", "1")
    assert code == 0 and len(rows) == 2
    with pytest.raises(SystemExit, match="rich"):
        main(["table", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit, match="matplotlib"):
        main(["chart", str(tmp_path / "rows.jsonl"), "x.svg"])


def test_warm_compiles_only_what_compiles(capsys, contenders):
    jitted = Plain("jitted")
    jitted.compiles = True
    contenders(jitted)
    assert main(["warm", "tiny/full", "tiny/causal", "--impl", "eager,jitted", "--device", "cpu", "--part", "1/2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warm tiny/causal jitted: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    names = ["tiny/full", "tiny/causal", "tiny/host", "tiny/memory", "tiny/sustained"]
    assert (
        main(["run", *names, "--dtype", "bf16", "--impl", "speedlight,sdpa,eager", "--rounds", "2", "--out", str(out)])
        == 0
    )
    rows = record.read_rows(out)
    assert {r["status"] for r in rows} == {"ok"} and all(r["device"] == "cuda" for r in rows)
    timed = [r for r in rows if r["mode"] == "timed"]
    assert all(0 < r["median_ms"] < 5 and r["host_us"] > 1 and r["peak_mib"] > 0 for r in timed)


def test_a_lost_device_ends_the_run(monkeypatch, tmp_path, capsys):
    def lost(*_):
        raise measure.DeviceLost("an illegal memory access was encountered")
        yield

    monkeypatch.setattr(measure, "run_case", lost)
    code = main(["run", "tiny/full", "--impl", "eager", "--device", "cpu"])
    assert code == 3 and "context is lost" in capsys.readouterr().err
