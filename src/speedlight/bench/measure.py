"""One case: admit contenders through the gate, set them up, measure, give rows.

Rows have status "ok", "skipped" (not here, or not this case), "refused" (it said so) or "failed" (wrong or broken).
Passes: "fwd" is the forward under no_grad, "bwd" the gradients of q, k and v alone (autograd.grad with a retained
graph), "fwdbwd" both in one call through autograd.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from .. import io_model
from . import gate, timing
from .baselines import Attention, Implementation, use_sdpa
from .cases import Case
from .gate import Gate, Results
from .record import Row, first_line
from .timing import Contender, Samples

Admitted = tuple[Implementation, Row]


class DeviceLost(RuntimeError):
    """The CUDA context is gone; nothing more can be measured in this process."""


@dataclass(frozen=True)
class Options:
    passes: tuple[str, ...] = ("fwd", "bwd")
    rounds: int = 5
    calls: int = 3  # of each pass in a contender's turn
    pause: float = 0.15  # seconds before each turn
    baseline: str | None = None
    deadline: float = float("inf")  # time.monotonic()
    sustain: float = 0.5  # seconds of back-to-back calls


def run_case(case: Case, implementations: Sequence[Implementation], judge: Gate, options: Options) -> Iterator[Row]:
    """Measure one case; rows come as they are known."""
    try:
        admitted = []
        for implementation in implementations:
            row = _admit(case, implementation, judge)
            if row["status"] == "ok":
                admitted.append((implementation, row))
            else:
                yield row
        if not admitted:
            return
        if case.mode == "memory" and case.device == "cpu":
            yield from _process_memory(case, admitted, options)
        else:
            yield from _measure(case, admitted, judge, options)
    finally:
        use_sdpa(None)
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()


def _admit(case: Case, implementation: Implementation, judge: Gate) -> Row:
    row: Row = {**case.fields(), "impl": implementation.name, "ours": implementation.ours, "pass": None}
    reason = implementation.importable() or implementation.supports(case)
    if reason:
        return {**row, "status": "skipped", "reason": reason}
    verdict = judge.check(implementation, case)
    _check_device(case)
    row["gate"] = {name: {k: float(f"{x:.3g}") for k, x in e.items()} for name, e in verdict.errors.items()}
    if verdict.status == "passed":
        return {**row, "status": "ok"}
    return {**row, "status": verdict.status, "reason": verdict.reason}


def _check_device(case: Case) -> None:
    """A CUDA error is sticky: ask the context whether it is still there."""
    if case.device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(first_line(error)) from error


def _measure(case: Case, admitted: Sequence[Admitted], judge: Gate, options: Options) -> Iterator[Row]:
    inputs = gate.random_inputs(case)
    cut = gate.spot(case)
    one = replace(case, lengths=(), name="spot")
    wanted = gate.reference_for(one, cut(inputs))
    plain = judge.plain_errors(case)

    contenders: list[Contender] = []
    rows: dict[str, Row] = {}
    for implementation, row in admitted:
        try:
            attn = implementation.make(case)
            implementation.prepare()
            with gate.poisoned(inputs):
                results = gate.forward_backward(attn, inputs)
            fault = gate.spot_faults(cut(results), wanted, plain)
            del results
            if fault:
                yield {**row, "status": "failed", "reason": fault}
                continue
            peaks = _cuda_peaks(attn, inputs, options.passes) if case.device == "cuda" else {}
            if case.mode == "memory":
                for name, peak in peaks.items():
                    yield {**row, "pass": name, "peak_mib": round(peak, 2), "baseline": options.baseline}
                continue
            contender = Contender(
                implementation.name, _calls(attn, case, inputs, options.passes), implementation.prepare
            )
            timing.warm(contender, case.device)
        except Exception as error:
            _check_device(case)
            status = "refused" if isinstance(error, NotImplementedError | torch.OutOfMemoryError) else "failed"
            yield {**row, "status": status, "reason": f"{type(error).__name__}: {first_line(error)}"}
            continue
        contenders.append(contender)
        rows[contender.name] = {**row, "peaks": peaks}
    if not contenders:
        return

    if case.mode == "sustained":
        samples = timing.sustained(
            contenders, case.device, rounds=min(options.rounds, 3), pause=options.pause, seconds=options.sustain
        )
    elif case.mode == "host":
        samples = timing.host_times(contenders, case.device)
    else:
        clock = timing.CudaClock() if case.device == "cuda" else timing.CpuClock()
        samples = timing.alternate(
            contenders, clock, rounds=options.rounds, calls=options.calls, pause=options.pause,
            deadline=options.deadline,
        )  # fmt: skip
    for contender in contenders:
        row = rows[contender.name]
        peaks = row.pop("peaks")
        if contender.fault:
            _check_device(case)
            yield {**row, "status": "failed", "reason": contender.fault}
            continue
        for name in contender.calls:
            base = samples.get((options.baseline or "", name))
            numbers = _numbers(case, name, samples[contender.name, name], base, options.baseline)
            peak = peaks.get("fwd" if name == "fwd" else "fwdbwd")
            yield {**row, "pass": name, **numbers, "peak_mib": None if peak is None else round(peak, 2)}


def _calls(attn: Attention, case: Case, inputs: Results, passes: Sequence[str]) -> dict[str, timing.Call]:
    q, k, v, dout = inputs
    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
    calls: dict[str, timing.Call] = {}
    if "fwd" in passes:
        calls["fwd"] = lambda: attn(q, k, v)
    if "bwd" in passes:
        if case.mode == "host":
            calls["fwdbwd"] = lambda: torch.autograd.grad(attn(*leaves), leaves, dout)
        else:
            out = attn(*leaves)
            calls["bwd"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return calls


def _cuda_peaks(attn: Attention, inputs: Results, passes: Sequence[str]) -> dict[str, float]:
    """Peak device memory above the inputs (q, k, v, dout), MiB, of inference and of forward and backward."""
    q, k, v, _ = inputs
    peaks = {}
    if "fwd" in passes:
        with torch.no_grad():
            attn(q, k, v)  # leaves behind what a first call leaves behind
            peaks["fwd"] = timing.cuda_peak_mib(lambda: attn(q, k, v))
    if "bwd" in passes:
        peaks["fwdbwd"] = timing.cuda_peak_mib(lambda: gate.forward_backward(attn, inputs))
    return peaks


def _numbers(case: Case, name: str, samples: Samples, base: Samples | None, baseline: str | None) -> dict[str, Any]:
    work = case.workload()
    flops = {"fwd": io_model.forward_flops(work), "bwd": io_model.backward_flops(work)}
    moved = {"fwd": io_model.minimal_forward_bytes(work), "bwd": io_model.minimal_backward_bytes(work)}
    parts = ("fwd", "bwd") if name == "fwdbwd" else (name,)
    ms = samples.median
    p10, p90 = samples.spread()
    apart = case.device == "cuda" or case.mode == "host"
    return {
        "median_ms": ms, "p10_ms": p10, "p90_ms": p90, "rounds": len(samples.rounds),
        "calls": len(samples.all), "round_ms": [round(one, 6) for one in samples.round_medians],
        # Host time says nothing about arithmetic. GB/s count the least bytes there are to move.
        "tflops": None if case.mode == "host" else sum(flops[part] for part in parts) / ms / 1e9,
        "gbps": None if case.mode == "host" else sum(moved[part] for part in parts) / ms / 1e6,
        # On the CPU the host time of a call is the call.
        "host_us": median(samples.host_us) if samples.host_us and apart else None,
        "baseline": baseline if base else None,
        "ratio": timing.ratio(base.round_medians, samples.round_medians) if base else None,
    }  # fmt: skip


def _process_memory(case: Case, admitted: Sequence[Admitted], options: Options) -> Iterator[Row]:
    """Peak resident memory above the inputs, each number from a process of its own."""
    for implementation, row in admitted:
        for name in ("fwd", "fwdbwd"):
            if (name == "fwd" and "fwd" not in options.passes) or (name == "fwdbwd" and "bwd" not in options.passes):
                continue
            command = [sys.executable, "-m", "speedlight.bench", "peak", case.name, implementation.name, name,
                       "--dtype", case.dtype_name]  # fmt: skip
            left = max(60.0, min(options.deadline - time.monotonic(), 1800.0))
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            except subprocess.TimeoutExpired:
                yield {**row, "pass": name, "status": "failed", "reason": f"not done after {left:.0f} s"}
                continue
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["killed, probably out of memory"])[-1]
                reason = f"process ended with {done.returncode}: {first_line(RuntimeError(last))}"
                yield {**row, "pass": name, "status": "failed", "reason": reason}
                continue
            peak = json.loads(done.stdout.splitlines()[-1])["peak_mib"]
            yield {**row, "pass": name, "peak_mib": round(peak, 2), "baseline": options.baseline}


def warm_up(case: Case, implementation: Implementation) -> None:
    """Compile what the gate and the timing of a case will need, into the caches on disk."""
    for each in (gate.small_case(case), case):
        attn, inputs = implementation.make(each), gate.random_inputs(each)
        implementation.prepare()
        gate.forward_backward(attn, inputs)
        with torch.no_grad():
            attn(*inputs[:3])


def process_peak(case: Case, implementation: Implementation, name: str) -> float:
    """The measurement behind :func:`_process_memory`, in the process that it is about."""
    short = replace(case, seqlen=64)  # loads libraries and starts threads
    gate.forward_backward(implementation.make(short), gate.random_inputs(short))
    attn, inputs = implementation.make(case), gate.random_inputs(case)
    implementation.prepare()
    if name == "fwdbwd":
        return timing.process_peak_mib(lambda: gate.forward_backward(attn, inputs))
    with torch.no_grad():
        return timing.process_peak_mib(lambda: attn(*inputs[:3]))
