"""The package as it is installed: what importing it loads, what the wheel holds, and that it does its own work."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from cases import BY_NAME
from torch.utils._python_dispatch import TorchDispatchMode

import speedlight
from speedlight.testing import make_grads, make_inputs, run

ROOT = Path(__file__).parents[1]
SOURCE = Path(speedlight.__file__).parent


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    path = os.pathsep.join(filter(None, (str(SOURCE.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_torch_and_nothing_heavy():
    loaded = python(
        """
import sys
import torch
before = set(sys.modules)
import speedlight
print(*sorted(m.split(".")[0] for m in set(sys.modules) - before if m.count(".") == 0))
print(*sorted(m for m in sys.modules if m.startswith("speedlight.")))
""",
        TRITON_INTERPRET="0",
    ).splitlines()
    extra = set(loaded[0].split()) - {"speedlight"} - set(sys.stdlib_module_names)
    assert extra == set()
    ours = set(loaded[1].split())
    assert "speedlight.api" in ours
    assert not {m for m in ours if m.startswith(("speedlight.demo", "speedlight.bench", "speedlight.cli"))}
    assert not {"speedlight.launch", "speedlight.backends.fa1", "speedlight.backends.fa2"} & ours
    assert not {"speedlight.testing", "speedlight.reference"} & ours


def test_everything_but_kernels_works_where_triton_cannot_be_found():
    said = python(
        """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name.split(".")[0] == "triton" else find_spec(name, *args)
sys.meta_path.insert(0, Hide())
import torch, speedlight
from speedlight import reference

q, k, v = (torch.randn(1, n, h, 8, requires_grad=True) for n, h in ((5, 4), (7, 2), (7, 2)))
out = speedlight.attention(q, k, v, causal=True)
out.sum().backward()
exact = reference.attention(q, k, v, causal=True)
torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(q.grad.double(), torch.autograd.grad(exact.sum(), q)[0].double(), rtol=1e-4, atol=1e-5)
try:
    speedlight.attention(q, k, v, backend="fa2")
except speedlight.UnsupportedError as refusal:
    print(refusal)
print("triton" in sys.modules)
"""
    ).splitlines()
    assert "pip install speedlight[triton]" in said[0]
    assert said[1] == "False"


def test_version_is_the_packages():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{speedlight.__version__}"' in text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    # A copy of what the wheel is made of: the build leaves its own files beside its input.
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(folder)], check=True)
    (folder / "README.md").touch()
    out = folder / "dist"
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.iterdir()
    return built


def test_the_wheel_is_one_small_file_for_every_platform(wheel):
    assert wheel.name == f"speedlight-{speedlight.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 500_000
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if n.endswith((".so", ".pyc", ".cu", ".cpp")) or "test_" in n]
    files = {str(p.relative_to(SOURCE.parent)) for p in SOURCE.rglob("*.py")}
    assert files - set(names) == set()
    for data in ("speedlight/data/lambda_NC_001416.fa.gz", "speedlight/demo/report.html.j2", "speedlight/py.typed"):
        assert data in names


def test_the_wheel_runs_without_the_source(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import torch, speedlight
q = torch.randn(1, 3, 2, 4)
print(speedlight.__file__)
print(speedlight.attention(q, q, q).shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    file, shape = done.stdout.splitlines()
    assert file.startswith(str(tmp_path))
    assert shape == "torch.Size([1, 3, 2, 4])"


def test_the_wheel_asks_for_torch_only(wheel):
    [metadata] = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA")]
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    required = [line.split(": ")[1] for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [r.split(">")[0] for r in required] == ["torch"]
    assert "License-File: LICENSE" in lines


class Recorded(TorchDispatchMode):
    """Every operator that runs, with the largest result that any of them had."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("name", ["causal", "long", "combined", "combined_varlen", "plain_bf16", "dropout"])
def test_the_cpu_backend_calls_no_attention_of_torchs(name):
    case = BY_NAME[name]
    inputs = make_inputs(case)
    dout, dlse = make_grads(case, inputs)
    from speedlight import ops, select
    from speedlight.backends.contract import Needs
    from speedlight.problem import describe

    problem, tensors = describe(*inputs[:3], *inputs.cu_seqlens, **inputs.options)
    cpu = select.load("cpu", speedlight.target.target_of(problem.device))[0]
    with Recorded() as seen:
        out, lse = ops.run_forward(problem, cpu, tensors)
        ops.run_backward(problem, cpu, tensors, out, lse, dout, dlse, Needs())
    assert {n for n in seen.names if "attention" in n or "sdp" in n or "softmax" in n} == set()
    assert any("bmm" in n for n in seen.names)  # the products did run under the recorder
    with Recorded() as seen:
        run(speedlight.attention, speedlight.attention_varlen, inputs, dout, dlse, backend="cpu")
    attention = {n for n in seen.names if "attention" in n}
    assert attention == {"speedlight::attention_forward", "speedlight::attention_backward"}


def test_the_cpu_backend_allocates_nothing_of_the_scores_size():
    """2048 x 2048 scores of one head would be 4 Mi values."""
    from speedlight import ops, select
    from speedlight.backends.contract import Needs
    from speedlight.problem import describe

    q, k, v = (torch.randn(1, 2048, 1, 16) for _ in range(3))
    slopes = torch.tensor([0.1])
    problem, tensors = describe(q, k, v, causal=True, alibi_slopes=slopes, dropout_p=0.1, dropout_seed=torch.tensor(3))
    cpu = select.load("cpu", speedlight.target.target_of(problem.device))[0]
    with Recorded() as seen:
        out, lse = ops.run_forward(problem, cpu, tensors)
        ops.run_backward(problem, cpu, tensors, out, lse, torch.ones_like(out), None, Needs(alibi_slopes=True))
    assert q.numel() <= seen.largest < 2048 * 2048 // 2
