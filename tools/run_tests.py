"""Runs the tests that need no GPU, in the processes they need, and sums them up in one last line.

Triton's interpreter and Triton's compiler exclude each other in a process (TRITON_INTERPRET is read when triton is
imported), and the package must work without Triton, so each part has a process and an environment of its own:

    python tools/run_tests.py [PART ...]        all parts by default
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = "3.6.0", "3.9.0"
# The oldest Triton need not show everything again.
SOME_TILES = "not test_tile_row or sm_90 or sm_80 or (not everything and -128-)"
SOME = "test_any_backward or combined or long or varlen_t or plain or drift or mixed_1"


@dataclass(frozen=True)
class Part:
    name: str
    arguments: tuple[str, ...]
    triton: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def _interpreted(version: str, selection: str) -> Part:
    return Part(f"interpreter-{version}", ("tests/backends", "-k", selection), version, {"TRITON_INTERPRET": "1"})


def _compiled(version: str, *selection: str) -> Part:
    launches = ("tests/test_launch.py", "tests/test_launch_plans.py")
    kernels = ("tests/backends/test_fa1_kernels.py", "tests/backends/test_fa3.py")
    tests = ("tests/compile", *launches, *kernels, "tests/test_select.py")
    return Part(f"compile-{version}", (*tests, *selection), version, {"TRITON_INTERPRET": "0"})


PARTS = (
    _compiled(NEWEST),
    _compiled(OLDEST, "-k", SOME_TILES),
    _interpreted(NEWEST, "fa1 or fa2 or fa3_rows or fa3_emulated"),
    _interpreted(OLDEST, f"(fa1 or fa2) and ({SOME})"),
    Part("main", ("tests", "--ignore=tests/compile"), environment={"TRITON_INTERPRET": "0"}),
)


@dataclass
class Result:
    passed: int
    failed: int
    skipped: int
    ok: bool
    seconds: float


def run(part: Part, folder: Path) -> Result:
    report = folder / f"{part.name}.xml"
    environment = {**os.environ, **part.environment}
    environment["OMP_NUM_THREADS"] = "1"  # workers and their threads would fight for the cores
    environment["TRITON_CACHE_DIR"] = str(folder / part.name)  # fresh: what is checked is compiled, not read back
    environment["PYTHONPATH"] = str(ROOT / ".triton-versions" / part.triton) if part.triton else ""
    workers = str(min(len(os.sched_getaffinity(0)), 8))
    distribution = ("-n", workers, "--dist=worksteal")
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", *distribution, f"--junitxml={report}", *part.arguments]
    print(f"\n=== {part.name}: {' '.join(command[2:])}", flush=True)
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    seconds = time.monotonic() - started
    if not report.exists():
        print(f"=== {part.name} ended without a report, exit status {code}", flush=True)
        return Result(0, 1, 0, False, seconds)
    total = failed = skipped = 0
    for suite in ElementTree.parse(report).iter("testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    if code != 0:
        failed = max(failed, 1)
    return Result(max(total - failed - skipped, 0), failed, skipped, code == 0, seconds)


def main(names: list[str]) -> int:
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        print(f"unknown part {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        results = {p.name: run(p, Path(folder)) for p in PARTS if not names or p.name in names}
    print(f"\n{'part':<20}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for name, r in results.items():
        print(f"{name:<20}{r.passed:>8}{r.failed:>8}{r.skipped:>9}{r.seconds:>9.0f}{'' if r.ok else '  FAILED'}")
    passed, failed, skipped = (sum(getattr(r, n) for r in results.values()) for n in ("passed", "failed", "skipped"))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 0 if all(r.ok for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
