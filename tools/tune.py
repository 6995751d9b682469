"""Measure tiles on the GPU at hand and print the best per kernel, head dimension and mask.

    python tools/tune.py --kernels fwd,dkdv,dq --dims 64,128 --seqlens 1024,4096,16384 [--candidates 128x64x8x3,...]
    python tools/tune.py --kernels fa3 --dims 64,128 --peers fa3_cuda,sdpa_cudnn

Kernels: fwd, dkdv and dq of `fa2`, tiles written block_m x block_n x num_warps x num_stages [r max_registers]; fa3, the
forward of `fa3`, tiles written num_consumers x block_n x num_stages, then letters: q Q in registers, n no ping-pong.

Every candidate is first compiled and run on a small problem in a process of its own, in parallel and with a time limit,
and must agree with the reference there. Those that survive are timed as the benchmark times, in turns with the peers.
Nothing is written: rows go into the backend's tiles.py by hand.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from speedlight import launch, reference
from speedlight.backends import fa2, fa3
from speedlight.backends.fa2.tiles import Tile
from speedlight.backends.fa3.tiles import FwdTile
from speedlight.bench import timing
from speedlight.bench.baselines import IMPLEMENTATIONS
from speedlight.bench.cases import Case
from speedlight.problem import describe

TOKENS, HIDDEN = 16384, 2048
SMALL = dict(tokens=1024, seqlen=512)  # where a candidate shows that it is right
CANDIDATES = {
    ("fwd", 64): "128x64x4x3 128x64x8x3 64x64x4x3 128x64x4x4",
    ("fwd", 128): "128x64x8x3 128x128x8x3 64x64x4x3",
    ("fwd", 256): "64x64x4x2 128x64x8x2 64x32x4x3 64x64x8x2 128x32x8x3 64x64x4x1",
    ("dkdv", 64): "64x128x8x3 64x64x4x3 32x128x4x3 64x64x4x4",
    ("dkdv", 128): "64x128x8x3 32x64x4x3 32x128x8x3 64x128x8x2",
    ("dkdv", 256): "32x64x8x1 32x64x8x2 64x64x8x1 32x64x4x1 32x128x8x1 64x32x4x1",
    ("dq", 64): "64x64x4x3r168 64x64x4x3 128x64x4x3 128x64x4x4",
    ("dq", 128): "128x64x8x3 128x32x8x3 64x64x4x2",
    ("dq", 256): "64x32x8x1 64x32x4x2 128x32x8x1 64x32x8x2 64x64x8x1 32x64x4x1",
    ("fa3", 64): "3x128x4 3x128x4n 2x128x4 2x128x4q 2x128x4qn",
    ("fa3", 128): "2x128x2 2x128x2n 2x128x2q 2x128x2qn",
    ("fa3", 256): "2x64x2 2x64x2n",
}
FLOPS = {"fwd": 1, "dkdv": 2, "dq": 1.5, "fa3": 1}  # products, in halves of those of a forward


def parse(text: str) -> Tile | FwdTile:
    if found := re.fullmatch(r"(\d+)x(\d+)x(\d+)([qn]*)", text):
        *sizes, letters = found.groups()
        return FwdTile(*map(int, sizes), pingpong="n" not in letters, q_in_registers="q" in letters)
    sizes, _, limit = text.partition("r")
    return Tile(*map(int, sizes.split("x")), max_registers=int(limit) if limit else None)


def prepared(
    kernel: str, dim: int, causal: bool, dtype: torch.dtype, seqlen: int, tokens: int = TOKENS
) -> tuple[dict[str, torch.Tensor], Callable[[Tile | FwdTile], None]]:
    """Random tensors, and a function of a tile that launches the kernel once on them."""
    batch, heads = max(1, tokens // seqlen), HIDDEN // dim
    q, k, v, dout = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype) for _ in range(4))
    problem, inputs = describe(q, k, v, causal=causal)
    out, lse = fa2.forward(problem, inputs)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if kernel in ("dkdv", "dq"):
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        tensors |= {"dout": dout, "delta": (out.float() * dout).sum(-1).mT.contiguous(), "dq": dq, "dk": dk, "dv": dv}
    if kernel == "fa3":
        tensors["counter"] = torch.zeros(2, dtype=torch.int32, device="cuda")

    def build(tile: Any) -> launch.Launch:
        if kernel == "fa3":
            return fa3.forward_launch(problem, tensors, tile, fa3._num_sms(problem.device))
        makers = {"fwd": fa2.forward_launch, "dkdv": fa2.dkdv_launch, "dq": fa2.dq_launch}
        return makers[kernel](problem, tensors, tile)

    return tensors, lambda tile: launch.run((kernel, problem, tile), problem.device, tensors, lambda: build(tile))


def worker(arguments: str) -> None:
    """One candidate on a small problem: ends with an error if it is wrong."""
    kernel, dim, causal, dtype, tile = json.loads(arguments)
    tensors, run = prepared(kernel, dim, causal, getattr(torch, dtype), **SMALL)
    inputs = [tensors[name].double().requires_grad_() for name in "qkv"]
    expected = reference.attention(*inputs, causal=causal)
    written = {"fwd": ["out"], "fa3": ["out"], "dkdv": ["dk", "dv"], "dq": ["dq"]}[kernel]
    if written != ["out"]:
        grads = torch.autograd.grad(expected, inputs, tensors["dout"].double())
        found = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    else:
        found = {"out": expected}
    for name in written:
        tensors[name].fill_(float("nan"))
    run(parse(tile))
    for name in written:
        error = (tensors[name].double() - found[name]).norm() / found[name].norm()
        assert error < 1e-2, f"{name} is off by {error:.1e}"


def survives(task: tuple[Any, ...], limit: float) -> bool:
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{task}: not done after {limit:.0f} s")
        return False
    if done.returncode:
        print(f"{task}: {(done.stderr.strip().splitlines() or ['ended without a word'])[-1]}")
    return done.returncode == 0


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kernels", default="fwd,dkdv,dq")
    ap.add_argument("--dims", default="64,128")
    ap.add_argument("--seqlens", default="1024,4096,16384")
    ap.add_argument("--causal", default="0,1")
    ap.add_argument("--dtype", default="bfloat16")
    ap.add_argument("--candidates", help="tiles, comma-separated, instead of those in this file")
    ap.add_argument("--peers", default="", help="the benchmark's names, for fwd and fa3")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--jobs", type=int, default=12)
    ap.add_argument("--compile-limit", type=float, default=60.0, help="seconds")
    ap.add_argument("--worker", help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.worker:
        worker(args.worker)
        return
    import triton

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    masks = [c == "1" for c in args.causal.split(",")]
    cells = list(itertools.product(args.kernels.split(","), map(int, args.dims.split(",")), masks))
    names = {c: args.candidates.split(",") if args.candidates else CANDIDATES[c[0], c[1]].split() for c in cells}
    tasks = [(*cell, args.dtype, tile) for cell in cells for tile in names[cell]]
    with ThreadPoolExecutor(args.jobs) as pool:
        alive = dict(zip(tasks, pool.map(lambda task: survives(task, args.compile_limit), tasks), strict=True))
    peers = [IMPLEMENTATIONS[name] for name in args.peers.split(",") if name]
    for kernel, dim, causal in cells:
        speeds: dict[str, list[float]] = {}
        for seqlen in map(int, args.seqlens.split(",")):
            dtype = getattr(torch, args.dtype)
            tensors, run = prepared(kernel, dim, causal, dtype, seqlen)
            contenders = [
                timing.Contender(tile, {"fwd": functools.partial(run, parse(tile))})
                for tile in names[kernel, dim, causal] if alive[kernel, dim, causal, args.dtype, tile]
            ]  # fmt: skip
            case = Case("tune", seqlen, HIDDEN // dim, dim, max(1, TOKENS // seqlen), causal=causal, dtype=dtype)
            for peer in peers if kernel in ("fwd", "fa3") else ():
                call = functools.partial(peer.make(case.resolved("cuda", None)), *(tensors[name] for name in "qkv"))
                contenders.append(timing.Contender(peer.name, {"fwd": call}))
            for contender in contenders:
                timing.warm(contender, "cuda")
            samples = timing.alternate(contenders, timing.CudaClock(), rounds=args.rounds, calls=20, pause=0.1)
            flops = 4 * TOKENS * seqlen * HIDDEN * (0.5 if causal else 1) * FLOPS[kernel]
            for contender in contenders:
                ms = samples[contender.name, "fwd"].median
                speeds.setdefault(contender.name, []).append(flops / ms / 1e9)
        print(f"{kernel} D{dim} {'causal' if causal else 'full'}: TFLOP/s at S = {args.seqlens}")
        for name, values in sorted(speeds.items(), key=lambda kv: -math.prod(kv[1])):
            print(f"  {name:<16}", " ".join(f"{x:6.0f}" for x in values), flush=True)


if __name__ == "__main__":
    main()
