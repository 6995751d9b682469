"""Result rows: one JSON object per line, written as they are measured, each with the environment it came from."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def environment(arguments: Sequence[str]) -> dict[str, Any]:
    """What a number depends on besides the code. Holds no machine paths: rows are published."""
    cuda = torch.cuda.is_available()
    driver, power = _nvidia_smi() if cuda else (None, None)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(arguments),
        "commit": _commit(),
        "speedlight": _speedlight_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": driver,
        "power_limit": power,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command with absolute paths cut to their last part."""

    def plain(argument: str) -> str:
        option, equals, value = argument.partition("=")
        if equals and os.path.isabs(value):
            return f"{option}={os.path.basename(value)}"
        return os.path.basename(argument) if os.path.isabs(argument) else argument

    return " ".join(["python -m speedlight.bench", *map(plain, arguments)])


def _output(*command: str, folder: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=folder)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvidia_smi() -> tuple[str | None, str | None]:
    text = _output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    fields = [field.strip() for field in (text or "").split("\n")[0].split(",")]
    return (fields[0], fields[1]) if len(fields) == 2 else (None, None)


def _commit() -> str | None:
    """From SPEEDLIGHT_COMMIT, for copies without their repository, or from git; "+" marks uncommitted changes."""
    named = os.environ.get("SPEEDLIGHT_COMMIT")
    if named:
        return named
    here = Path(__file__).parent
    commit = _output("git", "rev-parse", "--short=12", "HEAD", folder=here)
    if commit is None:
        return None
    return commit + ("+" if _output("git", "status", "--porcelain", "-uno", folder=here) else "")


def _speedlight_version() -> str | None:
    try:
        from speedlight import __version__
    except ImportError:
        return None
    return __version__


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def first_line(error: BaseException) -> str:
    """Enough of a message to know it by. Folders are cut from paths: rows are published."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/(?=[\w.])", "", line)


class Recorder:
    """Appends rows to a file line by line, so that a run that is killed loses nothing; None keeps them in memory."""

    def __init__(self, path: Path | None, env: dict[str, Any]) -> None:
        self.rows: list[Row] = []
        self._path, self._env = path, env
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        row = {**row, "env": self._env}
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows of a file. A last line cut short by a killed run is dropped; damage elsewhere raises."""
    lines = path.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def cell(row: Row) -> tuple[str, str, str, str, str]:
    """What a row measures: (case, dtype, device, pass, implementation)."""
    return row["case"], row["dtype"], row["device"], row["pass"], row["impl"]


def measured(rows: Iterable[Row]) -> dict[tuple[str, str, str, str, str], Row]:
    """Rows with numbers by cell; a later row replaces an earlier one."""
    return {cell(row): row for row in rows if row["status"] == "ok"}
