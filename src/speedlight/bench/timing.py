"""Clocks, interleaved rounds, host time and peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import torch

from .record import first_line

Call = Callable[[], Any]

TURN_MS = 60.0  # a contender's calls in one turn take about this long at most, so that it does not heat the card
HIGHEST_CLOCK = 2.0e9  # Hz, above any GPU here: a spin of n cycles then lasts at least n / HIGHEST_CLOCK seconds
LONGEST_LEAD = 0.05  # seconds


@dataclass
class Contender:
    """What is timed: calls by pass ("fwd", "bwd"), and an untimed ``prepare`` before each."""

    name: str
    calls: dict[str, Call]
    prepare: Call = lambda: None
    host_s: dict[str, float] = field(default_factory=dict)  # host seconds of a warm call
    estimate_ms: dict[str, float] = field(default_factory=dict)
    fault: str = ""  # why it dropped out


@dataclass
class Samples:
    """Times of one contender and pass in ms, one list per round, and host microseconds of the same calls."""

    rounds: list[list[float]] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    @property
    def all(self) -> list[float]:
        return [ms for one in self.rounds for ms in one]

    @property
    def median(self) -> float:
        return median(self.all)

    @property
    def round_medians(self) -> list[float]:
        return [median(one) for one in self.rounds]

    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        return spread(self.all)


def spread(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    deciles = quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds of base / other: above 1, other is faster. Rounds pair up calls made moments apart."""
    return median(b / o for b, o in zip(base, other, strict=False))


class Clock(Protocol):
    def turn(self, call: Call, prepare: Call, calls: int, lead_s: float) -> list[tuple[float, float]]:
        """Times ``calls`` calls: (ms, host microseconds) of each. ``lead_s``: host time to hide."""


class CpuClock:
    """Wall time. Caches stay as the call before left them."""

    def turn(self, call: Call, prepare: Call, calls: int, lead_s: float) -> list[tuple[float, float]]:
        times = []
        for _ in range(calls):
            prepare()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            times.append((seconds * 1e3, seconds * 1e6))
        return times


class CudaClock:
    """CUDA events around each call, after a 256 MiB write (cold L2) and a spin kernel that lasts until the host has
    queued the whole call, so that host time is no part of the number."""

    def __init__(self, flush_bytes: int = 256 << 20) -> None:
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")

    def turn(self, call: Call, prepare: Call, calls: int, lead_s: float) -> list[tuple[float, float]]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        host_us = []
        spin = int(min(lead_s, LONGEST_LEAD) * HIGHEST_CLOCK)
        for begin, end in events:
            prepare()
            self._flush.zero_()
            if spin:
                torch.cuda._sleep(spin)
            begin.record()
            start = time.perf_counter()
            call()
            host_us.append((time.perf_counter() - start) * 1e6)
            end.record()
        torch.cuda.synchronize()
        return [(begin.elapsed_time(end), us) for (begin, end), us in zip(events, host_us, strict=True)]


def grad_mode(name: str) -> torch.set_grad_enabled:
    """A lone forward is inference; everything else needs autograd."""
    return torch.set_grad_enabled(name != "fwd")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def warm(contender: Contender, device: str) -> None:
    """Call every pass until compilation and first-use work are over, then note its host time and its time."""
    for name, call in contender.calls.items():
        with grad_mode(name):
            contender.prepare()
            call()
            synchronize(device)
            hosts = []
            for _ in range(2):
                contender.prepare()
                start = time.perf_counter()
                call()
                hosts.append(time.perf_counter() - start)
                synchronize(device)
                contender.estimate_ms[name] = (time.perf_counter() - start) * 1e3
                if contender.estimate_ms[name] > 1000:
                    break
        contender.host_s[name] = min(hosts)


def rotated(contenders: Sequence[Contender], n: int) -> list[Contender]:
    """Those still in the race, in the order of round n."""
    racing = [c for c in contenders if not c.fault]
    shift = n % max(len(racing), 1)
    return racing[shift:] + racing[:shift]


def alternate(
    contenders: Sequence[Contender], clock: Clock, *, rounds: int, calls: int, pause: float,
    deadline: float = float("inf"),
) -> dict[tuple[str, str], Samples]:  # fmt: skip
    """Interleaved timing: in every round each contender has a turn, and the order rotates by one from round to round.

    A turn is a pause, in which the card cools, and ``calls`` calls of each pass (fewer when they are long). At least
    two rounds are made even when ``deadline`` (time.monotonic) has passed.

    Returns:
        Samples by (contender name, pass).
    """
    samples: dict[tuple[str, str], Samples] = {}
    lead = {
        name: 1.5 * max(c.host_s[name] for c in contenders if name in c.calls) + 50e-6
        for name in {name for c in contenders for name in c.calls}
    }
    for n in range(rounds):
        if n >= 2 and time.monotonic() > deadline:
            break
        for contender in rotated(contenders, n):
            time.sleep(pause)
            try:
                for name, call in contender.calls.items():
                    fitting = max(1, min(calls, int(TURN_MS / max(contender.estimate_ms[name], 1e-3))))
                    with grad_mode(name):
                        times = clock.turn(call, contender.prepare, fitting, lead[name])
                    kept = samples.setdefault((contender.name, name), Samples())
                    kept.rounds.append([ms for ms, _ in times])
                    kept.host_us += [us for _, us in times]
            except Exception as error:  # mostly memory, which the others' graphs take; the others go on
                contender.fault = f"{type(error).__name__}: {first_line(error)}"
    return samples


def sustained(
    contenders: Sequence[Contender], device: str, *, rounds: int, pause: float, seconds: float = 0.5
) -> dict[tuple[str, str], Samples]:
    """Mean time of back-to-back calls over ``seconds``, once per round: the rate at the card's power limit."""
    samples: dict[tuple[str, str], Samples] = {}
    for n in range(rounds):
        for contender in rotated(contenders, n):
            time.sleep(pause)
            for name, call in contender.calls.items():
                count = max(3, int(seconds * 1e3 / max(contender.estimate_ms[name], 1e-3)))
                contender.prepare()
                synchronize(device)
                with grad_mode(name):
                    start = time.perf_counter()
                    for _ in range(count):
                        call()
                    synchronize(device)
                    mean = (time.perf_counter() - start) / count
                samples.setdefault((contender.name, name), Samples()).rounds.append([mean * 1e3])
    return samples


def host_times(
    contenders: Sequence[Contender], device: str, *, batches: int = 30, calls: int = 25
) -> dict[tuple[str, str], Samples]:
    """Host time of a call until it returns, as mean over a batch of calls; batches of all contenders alternate.

    A synchronise before each batch empties the queue, and a batch is too short to fill it, so nobody waits for the
    device. On the CPU this is the whole time of the call.
    """
    samples: dict[tuple[str, str], Samples] = {}
    for n in range(batches + 2):
        for contender in rotated(contenders, n):
            for name, call in contender.calls.items():
                contender.prepare()
                synchronize(device)
                with grad_mode(name):
                    start = time.perf_counter()
                    for _ in range(calls):
                        call()
                    seconds = (time.perf_counter() - start) / calls
                synchronize(device)
                if n >= 2:  # the first batches warm caches up
                    kept = samples.setdefault((contender.name, name), Samples())
                    kept.rounds.append([seconds * 1e3])
                    kept.host_us.append(seconds * 1e6)
    return samples


def cuda_peak_mib(call: Call) -> float:
    """Most device memory allocated during a call beyond what was allocated before it, MiB. Call it once before: a first
    call may make workspaces that stay."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def process_peak_mib(call: Call) -> float:
    """Most resident memory of this process during a call beyond what was resident before it, MiB.

    Linux can reset the high-water mark; elsewhere the mark of the whole process is all there is, and memory that an
    earlier moment had used already is not seen. Meant for a process of its own.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, see proc_pid_clear_refs(5)
        before = _status_kib("VmRSS")
    except OSError:
        import resource
        import sys

        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 2**20
    call()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}")
