"""The command line of the benchmark. ``python -m speedlight.bench --help`` shows what there is."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import measure, report
from .baselines import DEFAULTS, IMPLEMENTATIONS, Implementation
from .cases import CASES, DTYPES, Case, select
from .gate import Gate
from .record import Recorder, Row, environment, first_line, read_rows


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parser().parse_args(arguments)
    try:
        return args.command(args, arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speedlight.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def choosing(name: str, text: str, command: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("cases", nargs="*", metavar="CASE", help="name, folder or glob (grid; cpu without a GPU)")
        defaults = "; ".join(f"{device}: {','.join(names)}" for device, names in DEFAULTS.items())
        sub.add_argument("--impl", help=f"comma-separated; default: {defaults}")
        sub.add_argument("--dtype", choices=sorted(DTYPES), help="instead of the case's own")
        sub.add_argument("--device", choices=("cuda", "cpu"), help="instead of the case's own")
        sub.add_argument("--time-limit", type=float, default=float("inf"), metavar="S", help="start no case after that")
        sub.set_defaults(command=command)
        return sub

    run = choosing("run", "check, then measure", _run)
    run.add_argument("--passes", default="fwd,bwd", help="fwd, bwd or both (default)")
    run.add_argument("--rounds", type=int, default=5, help="turns of each contender (default 5)")
    run.add_argument("--calls", type=int, default=3, help="calls of each pass in a turn (default 3)")
    run.add_argument("--pause", type=float, help="seconds before each turn (default 0.15 on a GPU, 0 on a CPU)")
    run.add_argument("--baseline", help="for the ratios (default sdpa_flash, sdpa or the first)")
    run.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append rows to this file")
    run.add_argument("--warm", type=int, default=0, metavar="N", help="first compile in N processes (see warm)")
    run.add_argument("--seed", type=int, help="of the random inputs (default: fresh)")

    warm = choosing("warm", "compile into the caches on disk, in parallel, without timing", _warm)
    warm.add_argument("--processes", type=int, default=8, metavar="N")
    warm.add_argument("--part", metavar="I/N", help=argparse.SUPPRESS)

    listing = commands.add_parser("list", help="cases and contenders")
    listing.set_defaults(command=_list)

    table = commands.add_parser("table", help="ratio tables of a file")
    table.add_argument("file", type=Path)
    table.add_argument("--baseline", help="default: the run's own")
    table.set_defaults(command=_table)

    compare = commands.add_parser("compare", help="two files, cell by cell")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--noise", type=float, default=report.NOISE, help=f"relative (default {report.NOISE})")
    compare.set_defaults(command=_compare)

    chart = commands.add_parser("chart", help="throughput over sequence length")
    chart.add_argument("file", type=Path)
    chart.add_argument("out", type=Path, metavar="OUT.svg")
    chart.add_argument("--cases", default="grid/*/causal/*", metavar="GLOB")
    chart.set_defaults(command=_chart)

    peak = commands.add_parser("peak", help="peak memory of one call in this process (used by run)")
    peak.add_argument("case")
    peak.add_argument("impl")
    peak.add_argument("name", choices=("fwd", "fwdbwd"))
    peak.add_argument("--dtype", choices=sorted(DTYPES))
    peak.set_defaults(command=_peak)
    return parser


def _chosen(args: argparse.Namespace) -> tuple[list[Case], list[Implementation]]:
    names = args.cases or (["grid"] if torch.cuda.is_available() else ["cpu"])
    cases = [case.resolved(args.device, args.dtype) for case in select(names)]
    wanted = args.impl.split(",") if args.impl else list(dict.fromkeys(n for c in cases for n in DEFAULTS[c.device]))
    unknown = [name for name in wanted if name not in IMPLEMENTATIONS]
    if unknown:
        raise ValueError(f"unknown implementation {', '.join(unknown)}; there are {', '.join(IMPLEMENTATIONS)}")
    return cases, [IMPLEMENTATIONS[name] for name in wanted]


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    started = time.monotonic()
    cases, implementations = _chosen(args)
    passes = tuple(args.passes.split(","))
    if not set(passes) <= {"fwd", "bwd"}:
        raise ValueError(f"--passes takes fwd, bwd or fwd,bwd, got {args.passes!r}")
    names = [i.name for i in implementations]
    baseline = args.baseline or next((n for n in ("sdpa_flash", "sdpa") if n in names), names[0])
    if baseline not in names:
        raise ValueError(f"the baseline {baseline} must be among --impl, got {', '.join(names)}")
    if args.warm:
        _warm_processes(args, args.warm)
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else args.seed
    recorder = Recorder(args.out, {**environment(arguments), "seed": seed})
    for implementation in implementations:
        reason = implementation.importable()
        if reason:
            print(f"{implementation.name}: not here, {reason}", flush=True)

    judge, bad, left_out = Gate(), 0, []
    for number, case in enumerate(cases):
        if time.monotonic() - started > args.time_limit:
            left_out.append(case.name)
            continue
        pause = args.pause if args.pause is not None else (0.15 if case.device == "cuda" else 0.0)
        options = measure.Options(passes, args.rounds, args.calls, pause, baseline, started + args.time_limit)
        torch.manual_seed(seed + number)
        try:
            for row in measure.run_case(case, implementations, judge, options):
                recorder.add(row)
                bad += row["ours"] and row["status"] == "failed"
                if row["status"] != "skipped":
                    print(_line(row), flush=True)
        except measure.DeviceLost as error:
            print(f"{case.name}: the GPU context is lost, stopping: {error}", file=sys.stderr)
            return 3
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
            bad += 1
    if left_out:
        print(f"time limit: {len(left_out)} cases not measured: {' '.join(left_out)}")
    print(f"{len(recorder.rows)} rows in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if bad else 0


def _line(row: Row) -> str:
    head = f"{row['case']:<24} {row['dtype']:<8} {row['pass'] or '':<6} {row['impl']:<14}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason']}"
    parts = []
    if row.get("median_ms") is not None:
        parts.append(f"{row['median_ms']:10.4f} ms")
    if row.get("tflops") is not None:
        on_cpu = row["device"] == "cpu"
        parts.append(f"{row['tflops'] * (1e3 if on_cpu else 1):7.1f} {'GFLOP/s' if on_cpu else 'TFLOP/s'}")
    if row.get("ratio") is not None:
        parts.append(f"x{row['ratio']:.3f}")
    if row.get("host_us") is not None:
        parts.append(f"host {row['host_us']:.1f} us")
    if row.get("peak_mib") is not None:
        parts.append(f"peak {row['peak_mib']:.1f} MiB")
    return head + " " + "  ".join(parts)


def _warm(args: argparse.Namespace, _: Sequence[str]) -> int:
    if args.part is None:
        _warm_processes(args, args.processes)
        return 0
    cases, implementations = _chosen(args)
    index, count = map(int, args.part.split("/"))
    pairs = [(c, i) for i in implementations for c in cases if i.compiles and not (i.importable() or i.supports(c))]
    for case, implementation in pairs[index::count]:
        started = time.monotonic()
        try:
            measure.warm_up(case, implementation)
            result = f"{time.monotonic() - started:.1f} s"
        except Exception as error:
            result = f"{type(error).__name__}: {first_line(error)}"
        print(f"warm {case.name} {implementation.name}: {result}", flush=True)
    return 0


def _warm_processes(args: argparse.Namespace, count: int) -> None:
    """Compile in processes of their own: Triton and Inductor compile one kernel at a time in each."""
    started = time.monotonic()
    command = [sys.executable, "-m", "speedlight.bench", "warm", *args.cases]
    for option in ("impl", "dtype", "device"):
        if getattr(args, option):
            command += [f"--{option}", getattr(args, option)]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    children = [subprocess.Popen([*command, "--part", f"{n}/{count}"], env=env) for n in range(count)]
    try:
        for child in children:
            left = args.time_limit - (time.monotonic() - started)
            try:
                child.wait(None if left == float("inf") else max(left, 1.0))
            except subprocess.TimeoutExpired:
                break
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    print(f"warm: {time.monotonic() - started:.0f} s", flush=True)


def _list(args: argparse.Namespace, _: Sequence[str]) -> int:
    for case in CASES:
        q, kv = case.shapes()
        extra = [case.mode] + ["causal"] * case.causal + ["by name only"] * case.optional
        extra += [f"window {case.window_left + 1}"] if case.window_left is not None else []
        extra += [f"{len(case.lengths)} packed sequences"] if case.lengths else []
        print(f"{case.name:<24} {case.device:<5} {case.dtype_name:<9} q {q} k, v {kv}  {', '.join(extra)}")
    for implementation in IMPLEMENTATIONS.values():
        print(f"{implementation.name:<24} {implementation.importable() or 'here'}")
    return 0


def _table(args: argparse.Namespace, _: Sequence[str]) -> int:
    report.print_tables(read_rows(args.file), args.baseline)
    return 0


def _compare(args: argparse.Namespace, _: Sequence[str]) -> int:
    report.print_comparison(read_rows(args.a), read_rows(args.b), args.noise)
    return 0


def _chart(args: argparse.Namespace, _: Sequence[str]) -> int:
    from .chart import draw

    draw(read_rows(args.file), args.out, args.cases)
    return 0


def _peak(args: argparse.Namespace, _: Sequence[str]) -> int:
    case = select([args.case])[0].resolved("cpu", args.dtype)
    peak = measure.process_peak(case, IMPLEMENTATIONS[args.impl], args.name)
    print(json.dumps({"peak_mib": peak}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
