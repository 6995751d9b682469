"""The `speedlight` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, cast

try:
    import typer
    from rich.console import Console
except ImportError:
    print("speedlight: the command line needs the demo extra: pip install 'speedlight[demo]'", file=sys.stderr)
    raise SystemExit(1) from None

# Newer Typer carries its own copy of Click, so the class is reached through the one name that both have.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from speedlight import __version__

        typer.echo(f"speedlight {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact attention for PyTorch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    fasta: Annotated[
        Path | None,
        typer.Argument(help="A genome in FASTA, plain or compressed.", show_default="embedded phage lambda"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Training time of both runs together.")] = 60,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    budget_mib: Annotated[
        float | None,
        typer.Option(min=1, help="Memory of one attention layer in MiB.", show_default="1024 on CPU, 4096 on CUDA"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and results.json.")] = Path("speedlight-demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the weights and batches.")] = 0,
) -> None:
    """Train a small transformer on a genome, once with Speedlight and once with standard attention, and compare.

    Shows both loss curves, the error against fp64, time and peak memory over the sequence length,
    and which backend ran and why.

    Prints a table and writes a self-contained report with charts. Needs no network.
    """
    try:
        from speedlight.demo import DemoError, Settings, report, run  # noqa: F401  (report: not only after two minutes)
    except ModuleNotFoundError as error:
        typer.echo(f"speedlight: the demo needs {error.name}: pip install 'speedlight[demo]'", err=True)
        raise typer.Exit(1) from None
    try:
        run(Settings(fasta, seconds, device, budget_mib, out, seed), Console())
    except DemoError as error:
        typer.echo(f"speedlight: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("speedlight: stopped.", err=True)
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point. A mistake in the command line, too, ends in one sentence on stderr instead of a usage page."""
    _let_threads_sleep()
    try:
        code = app(prog_name="speedlight", standalone_mode=False)
    except UsageError as error:
        print(f"speedlight: {error.format_message()}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _let_threads_sleep() -> None:
    """Start again with OpenMP threads that sleep while they wait, unless the user has chosen how they wait.

    By default they spin. Next to another busy process that makes small operations 10 to 100 times slower (measured with
    torch 2.13 on two cores), and a demo runs on whatever machine there is. OpenMP reads the setting once, when torch is
    loaded, which importing this package has done already.
    """
    if sys.platform == "linux" and sys.argv[1:2] == ["demo"] and "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, "-m", "speedlight.cli", *sys.argv[1:]])


if __name__ == "__main__":
    main()
