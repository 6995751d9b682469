"""The job behind `speedlight demo`: a real genome, one small model, two kinds of attention, and what differs."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import measure
from .genome import DemoError, Genome, read_genome
from .measure import MIB, Choice, ErrorRow, Point
from .model import ModelConfig, NucleotideModel
from .train import Run, Training, Windows, train_both

__all__ = ["DemoError", "Results", "Settings", "run"]

CPU_MODEL = ModelConfig(layers=2, heads=4, head_dim=32, context=2048, batch=1)
CUDA_MODEL = ModelConfig(layers=4, heads=8, head_dim=64, context=4096, batch=1)
CPU_BUDGET_MIB, CUDA_BUDGET_MIB = 1024, 4096
# Of the training time that was asked for: what the scaling panel gets, and where the whole demo has to end.
SCALE_SHARE, TOTAL_SHARE = 2.5, 4.5
SHORTEST_CONTEXT = 64
NAMES = {"speedlight": "Speedlight", "standard": "standard attention"}


@dataclass(frozen=True)
class Settings:
    """What the user asked for. `seconds` is the training time of both runs together; `longest` caps the sequences."""

    fasta: Path | None = None
    seconds: float = 60.0
    device: str = "auto"
    budget_mib: float | None = None
    out: Path = Path("speedlight-demo")
    seed: int = 0
    model: ModelConfig | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Results:
    """Everything measured in one demo, as the table and the report show it."""

    genome: Genome
    training: Training
    errors: list[ErrorRow]
    points: list[Point]
    choice: Choice
    budget_mib: float
    machine: dict[str, str]
    command: str
    started: datetime
    total_seconds: float
    report: Path = field(default=Path())


@dataclass(frozen=True)
class Job:
    """What the three stages of a demo share."""

    settings: Settings
    genome: Genome
    device: torch.device
    dtype: torch.dtype
    budget_mib: float
    started: float
    progress: Progress


def run(settings: Settings, console: Console) -> Results:
    """Run the demo with progress on `console`, write the report, and return what was measured. Raises DemoError."""
    started, clock = datetime.now().astimezone(), time.monotonic()
    genome = read_genome(settings.fasta)
    device = choose_device(settings.device)
    dtype = choose_dtype(device)
    prepare_folder(settings.out)
    budget_mib = settings.budget_mib or (CUDA_BUDGET_MIB if device.type == "cuda" else CPU_BUDGET_MIB)
    machine = describe_machine(device, dtype)
    about_genome = f"{genome.name}, {genome.length:,} bp, {genome.gc:.1%} GC"  # names may hold [brackets]
    console.print(f"[bold]Genome[/]   {escape(about_genome)}", highlight=False)
    console.print(f"[bold]Machine[/]  {escape(machine['device'])}, torch {machine['torch']}", highlight=False)

    with _progress(console) as progress:
        job = Job(settings, genome, device, dtype, budget_mib, clock, progress)
        training, models = _train(job)
        errors, choice = _errors(job, training, models["speedlight"])
        points = _scale(job, training.config)

    from . import report  # matplotlib takes a second to import

    results = Results(
        genome=genome,
        training=training,
        errors=errors,
        points=points,
        choice=choice,
        budget_mib=budget_mib,
        machine=machine,
        command=command_line(settings),
        started=started,
        total_seconds=time.monotonic() - clock,
    )
    results = replace(results, report=report.write(results, settings.out))
    console.print(report.table(results))
    console.print(f"Report: {results.report}", highlight=False, markup=False, soft_wrap=True)
    return results


def choose_device(name: str) -> torch.device:
    """The device called `name`: auto, cpu, cuda or cuda:N. Raises DemoError when it is unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"unknown device {name!r}: the demo runs on auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        raise DemoError(f"device {name!r} is not there: {seen}.")
    return device


def choose_dtype(device: torch.device) -> torch.dtype:
    """bf16 (by autocast) on GPUs that compute in it, fp32 elsewhere."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def prepare_folder(folder: Path) -> None:
    """Make the output folder now, so that a wrong path does not cost two minutes first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot write to {folder}: {error.strerror or error}.") from error
    if not os.access(folder, os.W_OK):
        raise DemoError(f"cannot write to {folder}: permission denied.")


def describe_machine(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Names and versions a reader needs to judge the numbers."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    return {
        "kind": device.type,
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "speedlight": metadata.version("speedlight") if _installed() else "from source",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads wait": os.environ.get("OMP_WAIT_POLICY", "as OpenMP has it"),
    }


def command_line(settings: Settings) -> str:
    """The command that repeats this demo."""
    parts = ["speedlight demo"]
    if settings.fasta:
        parts.append(str(settings.fasta))
    parts += [f"--seconds {settings.seconds:g}", f"--device {settings.device}", f"--seed {settings.seed}"]
    if settings.budget_mib:
        parts.append(f"--budget-mib {settings.budget_mib:g}")
    return " ".join(parts)


def _installed() -> bool:
    try:
        metadata.version("speedlight")
    except metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    """The CPU's name; Linux keeps it where `platform` does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description:<25}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
        console=console,
    )


def _train(job: Job) -> tuple[Training, dict[str, NucleotideModel]]:
    """Both trainings. A device whose memory standard attention overflows gets half the context until it fits."""
    config = job.settings.model or (CUDA_MODEL if job.device.type == "cuda" else CPU_MODEL)
    add, update = job.progress.add_task, job.progress.update
    tasks = {name: add(f"Train, {label}", total=None, note="calibrating") for name, label in NAMES.items()}

    def on_start(steps: int) -> None:
        for task in tasks.values():
            update(task, total=steps, note="")

    def on_step(runs: dict[str, Run]) -> None:
        for name, task in tasks.items():
            update(task, completed=len(runs[name].losses), note=f"{runs[name].losses[-1]:.4f} bits/nt")

    settings = job.settings
    while True:
        try:
            trained = train_both(
                job.genome.tokens, config, settings.seconds, job.device, job.dtype, settings.seed, on_start, on_step
            )
        except torch.OutOfMemoryError:
            if config.context <= SHORTEST_CONTEXT:
                raise
            config = replace(config, context=config.context // 2)
        else:
            break
        torch.cuda.empty_cache()
    for task in tasks.values():
        update(task, total=trained[0].steps)
    return trained


def _errors(job: Job, training: Training, model: NucleotideModel) -> tuple[list[ErrorRow], Choice]:
    """Error panel and choice of backend, both on the trained model's own q, k, v."""
    window = Windows(job.genome.tokens, training.config, job.device, job.settings.seed).validation()[0]
    q, k, v, dout = measure.capture(model, window[:, : measure.ERROR_WINDOW + 1], job.device, job.dtype)
    dtypes = [torch.float32, torch.bfloat16]
    rows = []
    task = job.progress.add_task("Error against fp64", total=len(dtypes) * len(measure.RESULTS), note="")
    for row in measure.compare_with_fp64(q, k, v, dout, dtypes):
        rows.append(row)
        job.progress.update(task, advance=1, note=f"{row.dtype} {row.tensor}")
    job.progress.update(task, note="")
    return rows, measure.explain(*(t.to(job.dtype) for t in (q, k, v)))


def _scale(job: Job, config: ModelConfig) -> list[Point]:
    """Time and memory over the sequence length, up to the whole genome, in the time that is left for it."""
    longest = min(job.genome.length, job.settings.longest or job.genome.length)
    lengths = measure.sequence_lengths(longest)
    tasks = {
        method: job.progress.add_task(f"Scale, {NAMES[method]}", total=len(lengths), note="", start=False)
        for method in ("standard", "speedlight")
    }
    job.progress.start_task(tasks["standard"])

    def on_point(point: Point) -> None:
        task = tasks[point.method]
        job.progress.start_task(task)
        if point.measured:
            job.progress.update(task, advance=1, note=f"{point.seqlen:,} nt in {point.seconds:.2f} s")
        else:
            done = job.progress.tasks[task].completed
            job.progress.update(task, total=done, note=f"then {point.stopped}")

    dtype, threads = str(job.dtype).removeprefix("torch."), torch.get_num_threads()
    problem = measure.Problem(config.heads, config.head_dim, dtype, str(job.device), threads)
    asked = job.settings.seconds
    left = TOTAL_SHARE * asked - (time.monotonic() - job.started)
    seconds = min(SCALE_SHARE * asked, max(left, asked / 2))
    return measure.scale(problem, lengths, job.budget_mib * MIB, seconds, on_point)
