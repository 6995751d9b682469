"""The demo: reading FASTA, refusing bad input in one sentence, and a report that says what was measured."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("dnaio")
pytest.importorskip("matplotlib")

from rich.console import Console
from typer.testing import CliRunner

from speedlight import cli, demo, reference
from speedlight.demo import measure, report
from speedlight.demo.genome import read_genome
from speedlight.demo.model import METHODS, ModelConfig
from speedlight.demo.train import Trainer, markov_bits

BASES = "ACGTTGCAAC" * 200
TINY = ModelConfig(layers=1, heads=2, head_dim=16, context=128, batch=1)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads would wait for each other where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fasta(folder: Path, text: str | bytes, name: str = "in.fa") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_embedded_genome_is_phage_lambda():
    genome = read_genome()
    assert (genome.length, genome.records, genome.known) == (48_502, 1, 48_502)
    assert genome.identifier == "gi|9626243|ref|NC_001416.1"
    assert "lambda" in genome.name
    assert genome.tokens[:12].tolist() == [2, 2, 2, 1, 2, 2, 1, 2, 0, 1, 1, 3]  # the cos end: GGGCGGCGACCT
    assert torch.bincount(genome.tokens, minlength=5).tolist() == [12_334, 11_362, 12_820, 11_986, 0]


def test_fasta_forms_mean_the_same(tmp_path):
    plain = read_genome(fasta(tmp_path, f">x one\n{BASES}\n"))
    lower = read_genome(fasta(tmp_path, f">x\n{BASES.lower()}\n"))
    rna = read_genome(fasta(tmp_path, f">x\r\n{BASES.replace('T', 'U')}\r\n"))
    zipped = read_genome(fasta(tmp_path, gzip.compress(f">x\n{BASES[:70]}\n{BASES[70:]}\n".encode()), "in.fa.gz"))
    for other in (lower, rna, zipped):
        assert torch.equal(other.tokens, plain.tokens)
    assert (plain.name, plain.identifier, plain.length) == ("one", "x", 2000)
    assert plain.gc == pytest.approx(0.5)


def test_records_are_kept_apart_and_ambiguity_is_unknown(tmp_path):
    genome = read_genome(fasta(tmp_path, f">a\n{BASES}\n>empty\n>b\nRYSWKMBDHVN-\n{BASES}\n"))
    assert (genome.records, genome.length, genome.known) == (3, 4012, 4000)
    assert len(genome.tokens) == 4013  # the separator between two records
    assert genome.tokens[2000:2013].eq(4).all()
    assert not genome.tokens[:2000].eq(4).any()


def test_long_genomes_are_read_up_to_a_limit(tmp_path):
    genome = read_genome(fasta(tmp_path, f">a\n{BASES}\n>b\n{BASES}\n"), max_length=3000)
    assert genome.truncated
    assert genome.length == 3000


BAD = {
    "protein": (">p\n" + "MKVLAAGIVGLLLAQPSFE" * 90, "is this a protein"),
    "no header": (BASES, "it is not a FASTA file"),
    "fastq": ("@r\nACGT\n+\nIIII\n", "it is not a FASTA file"),
    "no record": ("", "it holds no FASTA record"),
    "empty sequence": (">x\n", "its sequence is empty"),
    "short": (">x\nACGT\n", "4 bp is too short"),
    "all unknown": (">x\n" + "N" * 3000, "only 0 of its 3,000 letters"),
    "not text": (bytes(range(256)) * 20, "it is not text"),
    "damaged gzip": (gzip.compress(BASES.encode())[:-20], "ended before"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_one_sentence(case, tmp_path):
    text, sentence = BAD[case]
    path = fasta(tmp_path, text, "in.fa.gz" if "gzip" in case else "in.fa")
    result = CliRunner().invoke(cli.app, ["demo", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.startswith("speedlight: cannot ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere/x.fa"], "there is no such file"),
        (["/"], "it is a directory"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--device", "cuda:99"], "is not there"),
        (["--out", f"{__file__}/x"], "cannot write to"),
    ],
)
def test_bad_argument_is_one_sentence(arguments, sentence):
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--fast"], "No such option: --fast"),
        (["demo", "--seconds", "soon"], "--seconds"),
        (["demo", "--seconds", "0"], "--seconds"),
        (["dmeo"], "No such command 'dmeo'"),
    ],
)
def test_usage_error_is_one_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speedlight", *arguments])
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # else main starts a new process in this one's place
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.strip().count("\n") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="where torch uses another OpenMP, main leaves it alone")
def test_threads_sleep_unless_told_otherwise(monkeypatch):
    started = []
    monkeypatch.setattr(cli.os, "execv", lambda program, arguments: started.append(arguments[1:]))
    monkeypatch.setattr(sys, "argv", ["speedlight", "demo", "--seed", "1"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    cli._let_threads_sleep()
    assert started == []
    monkeypatch.delenv("OMP_WAIT_POLICY")
    cli._let_threads_sleep()
    assert started == [["-m", "speedlight.cli", "demo", "--seed", "1"]]
    assert cli.os.environ["OMP_WAIT_POLICY"] == "passive"


def test_interrupt_is_one_sentence(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert (result.exit_code, result.output) == (130, "speedlight: stopped.\n")


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("typer", "the command line needs the demo extra"),
        ("dnaio", "the demo needs dnaio"),
        ("matplotlib", "needs matplotlib"),
    ],
)
def test_missing_extra_says_how_to_install_it(missing, sentence):
    code = f"import sys; sys.modules[{missing!r}] = None; from speedlight.cli import app; app(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.endswith("pip install 'speedlight[demo]'\n")
    assert done.stderr.count("\n") == 1


def test_both_routes_agree_with_fp64_at_the_start():
    config = ModelConfig(layers=2, heads=4, head_dim=32, context=256)
    window = torch.randint(5, (1, 257), generator=torch.Generator().manual_seed(1))
    routes = {**METHODS, "exact": lambda q, k, v: reference.attention(q, k, v, causal=True).to(q.dtype)}
    losses, grads = {}, {}
    for name, attend in routes.items():
        trainer = Trainer(config, attend, torch.device("cpu"), torch.float32, seed=3)
        if name == "exact":
            trainer.model.double()
        loss = trainer.model.loss(window)
        loss.backward()
        losses[name], grads[name] = loss.item(), trainer.model.blocks[0].qkv.weight.grad.double()
    for name in METHODS:
        assert losses[name] == pytest.approx(losses["exact"], abs=2e-6)
        torch.testing.assert_close(grads[name], grads["exact"], rtol=0, atol=1e-5 * grads["exact"].abs().max().item())


def test_loss_counts_known_nucleotides_only():
    trainer = Trainer(TINY, METHODS["standard"], torch.device("cpu"), torch.float32, seed=0)
    window = torch.randint(4, (1, 129), generator=torch.Generator().manual_seed(1))
    window[0, 100:] = 4
    torch.testing.assert_close(trainer.model.loss(window), trainer.model.loss(window[:, :100]))


def test_markov_chain_on_known_sequences():
    periodic = torch.tensor([0, 1, 2, 3] * 5000, dtype=torch.uint8)
    assert markov_bits(periodic, periodic[:4000]) < 0.01
    noise = torch.randint(4, (40_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert markov_bits(noise, noise[:4000].flip(0)) == pytest.approx(2.0, abs=0.02)


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory, one_thread):
    """A whole demo in small."""
    settings = demo.Settings(
        seconds=3, out=tmp_path_factory.mktemp("demo"), device="cpu", model=TINY, longest=1024, budget_mib=150
    )
    return demo.run(settings, Console(quiet=True))


def test_both_methods_learn_the_same(tiny_demo):
    training = tiny_demo.training
    ours, theirs = (training.runs[name] for name in report.METHODS)
    assert training.steps >= 6
    assert len(ours.losses) == len(theirs.losses) == training.steps
    assert max(training.differences) < 1e-3
    assert theirs.losses[0] == pytest.approx(ours.losses[0], abs=2e-6)
    assert ours.validation[-1][1] < ours.validation[0][1]  # it does learn


def test_errors_are_those_of_the_dtype(tiny_demo):
    keys = [(row.dtype, row.tensor) for row in tiny_demo.errors]
    assert keys == [(dtype, name) for dtype in ("float32", "bfloat16") for name in measure.RESULTS]
    for row in tiny_demo.errors:
        low, high = (1e-9, 1e-5) if row.dtype == "float32" else (1e-5, 5e-2)
        assert low < row.speedlight < high
        assert low < row.standard < high


def test_demo_measures_both_methods(tiny_demo):
    assert [(p.method, p.seqlen) for p in tiny_demo.points] == [("standard", 1024), ("speedlight", 1024)]
    assert all(p.measured and p.seconds > 0 and p.passes > 0 for p in tiny_demo.points)


def test_points_grow_until_the_budget():
    problem = measure.Problem(heads=2, head_dim=16, dtype="float32", device="cpu", threads=1)
    points = measure.scale(problem, [1024, 2048], budget_bytes=80 * measure.MIB, seconds=600)
    assert [(p.method, p.seqlen) for p in points] == [(m, n) for m in ("standard", "speedlight") for n in (1024, 2048)]
    ran, stopped, *ours = points
    assert all(p.measured for p in (ran, *ours))
    assert stopped.stopped == "over the memory budget"
    assert stopped.peak_bytes == 4 * ran.peak_bytes > 80 * measure.MIB
    assert ran.peak_bytes > 2 * 4 * 1024**2  # it held the scores of two heads at least
    assert ours[0].peak_bytes < ran.peak_bytes / 2


def test_report_shows_what_was_measured(tiny_demo):
    page = tiny_demo.report.read_text(encoding="utf-8")
    summary = report.Summary(tiny_demo)
    shown = [report.scientific(summary.largest_difference), summary.headline, tiny_demo.choice.backend, "48,502"]
    shown += [f"{summary.final[name]:.5f}" for name in report.METHODS]
    shown += [f"{summary.rate[name]:,.0f}" for name in report.METHODS]
    shown += [report.scientific(row.speedlight) for row in tiny_demo.errors]
    shown += [report.duration(p.seconds) for p in tiny_demo.points if p.measured]
    shown += [report.memory(p.peak_bytes) for p in tiny_demo.points]
    missing = [text for text in shown if text not in page]
    assert not missing
    assert "<svg" in page
    assert 'src="' not in page and 'href="http' not in page  # opens offline
    assert len(page) < 500_000
    assert not any(colour in page for colour in report.PLACEHOLDERS.values())


def test_results_file_is_the_same_numbers(tiny_demo):
    stored = json.loads((tiny_demo.report.parent / "results.json").read_text())
    assert stored["training"]["runs"]["speedlight"]["losses"] == tiny_demo.training.runs["speedlight"].losses
    assert [p["seconds"] for p in stored["points"]] == [p.seconds for p in tiny_demo.points]
    assert stored["genome"]["length"] == 48_502


def test_report_of_an_unlucky_run(tiny_demo):
    """No memory measurable, one method never ran, Speedlight slower, curves apart: the page says so."""
    runs = {name: copy.deepcopy(run) for name, run in tiny_demo.training.runs.items()}
    runs["speedlight"].step_seconds = [2 * seconds for seconds in runs["standard"].step_seconds]
    runs["speedlight"].losses = [loss + 0.5 for loss in runs["standard"].losses]
    points = [
        measure.Point("standard", 1024, float("nan"), None, stopped="out of memory"),
        measure.Point("speedlight", 1024, 0.5, None, passes=1),
    ]
    results = replace(tiny_demo, points=points, training=replace(tiny_demo.training, runs=runs))
    page = report.render(results)
    assert "<h1>Losses within 0.50 bits, 2.0× slower training</h1>" in page
    assert "the curves lie on each other" not in page
    assert "out of memory" in page and "does not tell a process its peak memory" in page
    assert report.table(results).row_count > 5
    assert json.loads(json.dumps(report.as_json(results), allow_nan=False))["points"][0]["seconds"] is None


def test_words_follow_the_numbers():
    assert report.compare(2.0) == "2.0× faster"
    assert report.compare(0.5) == "2.0× slower"
    assert report.memory(3.5 * 1024 * measure.MIB).split() == ["3.5", "GiB"]
    assert report.duration(0.0123).split() == ["12.3", "ms"]
    assert report.power_tick(1e-7) == "10⁻⁷"


def test_a_stop_is_extrapolated_from_the_last_point():
    last = measure.Point("standard", 1024, 1.0, 100.0)
    over = measure._stop(last, 2048, growth=2, budget_bytes=300, left=60)
    assert (over.stopped, over.seconds, over.peak_bytes) == ("over the memory budget", 4.0, 400.0)
    assert measure._stop(last, 2048, growth=1, budget_bytes=300, left=60) is None
    assert measure._stop(last, 2048, growth=1, budget_bytes=300, left=3).stopped == "out of time"


def test_sequence_lengths_end_with_the_genome():
    assert measure.sequence_lengths(5000) == [1024, 2048, 4096, 5000]
    assert measure.sequence_lengths(700) == [700]
