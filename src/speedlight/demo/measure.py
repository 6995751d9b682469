"""Measure both kinds of attention: error against fp64, and time and peak memory as the sequence grows.

On the CPU every point runs in a process of its own (`python -m speedlight.demo.measure '{...}'`): only a fresh process
has a peak that belongs to one computation. On CUDA the allocator counts, so the points run here.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import speedlight
from speedlight import reference

from .model import METHODS, Attend, NucleotideModel, future_mask
from .train import synchronize

MIB = 2**20
SHORTEST = 1024
ERROR_WINDOW = 2048
MAX_PASSES = 4
PASSES_SECONDS = 4.0
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class ErrorRow:
    """Largest error of one result against fp64, as a share of the result's largest value."""

    dtype: str
    tensor: str
    speedlight: float
    standard: float


@dataclass(frozen=True)
class Choice:
    """What `speedlight.explain` says of the model's attention."""

    backend: str
    tile: str
    refused: dict[str, str]


@dataclass(frozen=True)
class Point:
    """One method at one sequence length: forward and backward of one attention layer.

    `seconds` is the median of `passes`, `peak_bytes` the memory above the inputs (None: not measurable here). A point
    that was not run says why in `stopped` and carries the extrapolated values instead.
    """

    method: str
    seqlen: int
    seconds: float
    peak_bytes: float | None
    passes: int = 0
    stopped: str = ""

    @property
    def measured(self) -> bool:
        return not self.stopped


@dataclass(frozen=True)
class Problem:
    """What the scaling points share: one attention layer of the model, batch 1, causal."""

    heads: int
    head_dim: int
    dtype: str
    device: str
    threads: int


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def capture(model: NucleotideModel, window: Tensor, device: torch.device, dtype: torch.dtype) -> Tensors:
    """q, k, v (1, S, H, D) of the model's last layer on a window (1, S + 1), and the loss's gradient there."""
    seen: list[Tensor] = []

    def recording(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = METHODS["speedlight"](q, k, v)
        out.retain_grad()
        seen[:] = q, k, v, out
        return out

    model.set_attention(recording)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = model.loss(window)
    loss.backward()
    model.set_attention(METHODS["speedlight"])
    q, k, v, out = seen
    assert out.grad is not None
    return q.detach(), k.detach(), v.detach(), out.grad.detach()


def gradients(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensors:
    """out, dq, dk, dv of `attend` at q, k, v."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = attend(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))
    return out.detach(), dq, dk, dv


def compare_with_fp64(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dtypes: list[torch.dtype]) -> Iterator[ErrorRow]:
    """Errors of both methods in each dtype, against the fp64 oracle on the very same rounded inputs."""
    for dtype in dtypes:
        inputs = (q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dtype))
        exact = gradients(_oracle, *(t.double() for t in inputs))
        measured = {name: gradients(attend, *inputs) for name, attend in METHODS.items()}
        for index, tensor in enumerate(RESULTS):
            scale = exact[index].abs().max().item() or 1.0
            errors = {
                name: (results[index].double() - exact[index]).abs().max().item() / scale
                for name, results in measured.items()
            }
            yield ErrorRow(str(dtype).removeprefix("torch."), tensor, errors["speedlight"], errors["standard"])


def _oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attention(q, k, v, causal=True)


def explain(q: Tensor, k: Tensor, v: Tensor) -> Choice:
    """Speedlight's own account of the backend it takes for q, k, v (B, S, H, D)."""
    told = speedlight.explain(q, k, v, causal=True)
    return Choice(str(told.backend), str(told.tile), {str(name): str(why) for name, why in told.refused.items()})


def sequence_lengths(longest: int, shortest: int = SHORTEST) -> list[int]:
    """Powers of two from `shortest` on, and the whole genome as the last."""
    lengths = []
    seqlen = shortest
    while seqlen < longest:
        lengths.append(seqlen)
        seqlen *= 2
    return [*lengths, longest]


def scale(
    problem: Problem,
    lengths: list[int],
    budget_bytes: float,
    seconds: float,
    on_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Both methods over growing lengths, until the next point would pass the memory budget or the time left.

    The next point is extrapolated from the last one: time with the square of the length; memory with its square too for
    standard attention, linearly for Speedlight. Standard attention goes first and gets at most a third of the time.
    """
    start = time.monotonic()
    points: list[Point] = []
    for method, growth, share in (("standard", 2, 1 / 3), ("speedlight", 1, 1.0)):
        last: Point | None = None
        for seqlen in lengths:
            left = share * seconds - (time.monotonic() - start)
            point = _stop(last, seqlen, growth, budget_bytes, left) if last else None
            point = point or _measure(method, seqlen, problem, max(left, 5.0))
            points.append(point)
            on_point(point)
            last = point
            if point.stopped:
                break
            if point.peak_bytes is not None and point.peak_bytes > budget_bytes:
                break
    return points


def _stop(last: Point, seqlen: int, growth: int, budget_bytes: float, left: float) -> Point | None:
    """The point that is not run because memory or time would not do, with the extrapolated values; None to run it."""
    ratio = seqlen / last.seqlen
    seconds = last.seconds * ratio**2
    peak = None if last.peak_bytes is None else last.peak_bytes * ratio**growth
    if peak is not None and peak > budget_bytes:
        return Point(last.method, seqlen, seconds, peak, stopped="over the memory budget")
    if seconds > left:
        return Point(last.method, seqlen, seconds, peak, stopped="out of time")
    return None


def _measure(method: str, seqlen: int, problem: Problem, left: float) -> Point:
    """Run one point: in a fresh process on the CPU, here on CUDA."""
    if problem.device != "cpu":
        try:
            return Point(method, seqlen, *run_point(method, seqlen, problem))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Point(method, seqlen, float("nan"), None, stopped="out of memory")
    job = json.dumps({"method": method, "seqlen": seqlen, "problem": asdict(problem)})
    command = [sys.executable, "-m", "speedlight.demo.measure", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left + 60)
    except subprocess.TimeoutExpired:
        return Point(method, seqlen, float("nan"), None, stopped="out of time")
    if done.returncode == 0:
        return Point(method, seqlen, *json.loads(done.stdout.splitlines()[-1]))
    # A negative code is a signal, here the one with which the system ends what has no memory left.
    if done.returncode < 0 or "not enough memory" in done.stderr:
        return Point(method, seqlen, float("nan"), None, stopped="out of memory")
    reason = (done.stderr.splitlines() or ["no message"])[-1]
    return Point(method, seqlen, float("nan"), None, stopped=f"failed: {reason}")


def run_point(method: str, seqlen: int, problem: Problem) -> tuple[float, float | None, int]:
    """(median seconds, peak bytes, passes) of forward and backward on random q, k, v (1, S, H, D)."""
    device = torch.device(problem.device)
    if device.type == "cpu":
        torch.set_num_threads(problem.threads)
    generator = torch.Generator(device).manual_seed(0)

    def inputs(length: int) -> list[Tensor]:
        shape = (1, length, problem.heads, problem.head_dim)
        dtype = getattr(torch, problem.dtype)
        return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]

    gradients(METHODS[method], *inputs(128))  # loads libraries and starts threads, which is nobody's memory or time
    tensors = inputs(seqlen)
    if device.type == "cuda":
        gradients(METHODS[method], *tensors)  # compiles the kernels of this length
        future_mask.cache_clear()  # the mask is part of what standard attention needs
    meter: CudaMeter | ProcessMeter = CudaMeter(device) if device.type == "cuda" else ProcessMeter()
    meter.start()
    seconds = [_timed(method, tensors, device)]
    peak = meter.peak()
    while len(seconds) < MAX_PASSES and sum(seconds) + seconds[-1] < PASSES_SECONDS:
        seconds.append(_timed(method, tensors, device))
    # The first pass also pays for fresh pages; it counts only where it is the only one.
    return statistics.median(seconds[1:] or seconds), peak, len(seconds)


def _timed(method: str, tensors: list[Tensor], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    gradients(METHODS[method], *tensors)
    synchronize(device)
    return time.perf_counter() - start


class CudaMeter:
    """Peak of the CUDA allocator above its level at `start`, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = 0

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.base = torch.cuda.memory_allocated(self.device)

    def peak(self) -> float:
        return float(torch.cuda.max_memory_allocated(self.device) - self.base)


class ProcessMeter:
    """Peak of this process's resident memory above its level at `start`, in bytes; None where no system tells."""

    def __init__(self) -> None:
        self.base: int | None = None

    def start(self) -> None:
        # Sets the high-water mark back to the present level. Where that is refused, the mark may still be the import's.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.base = _resident("VmRSS")

    def peak(self) -> float | None:
        high = _resident("VmHWM")
        if self.base is None or high is None:
            return None
        return float(max(high - self.base, 0))


def _resident(field: str) -> int | None:
    """A memory field of /proc/self/status in bytes; elsewhere the peak that getrusage knows, or None."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _worker(job: str) -> None:
    """Run the point that `job` (JSON) describes and print its numbers as one line of JSON."""
    described = json.loads(job)
    print(json.dumps(run_point(described["method"], described["seqlen"], Problem(**described["problem"]))))


if __name__ == "__main__":
    _worker(sys.argv[1])
