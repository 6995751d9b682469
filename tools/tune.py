"""Measure `fa2` tiles on the GPU at hand and print the best per kernel, head dimension and mask.

    python tools/tune.py --kernels fwd,dkdv,dq --dims 64,128 --seqlens 1024,4096,16384 [--candidates 128x64x8x3,...]

Every candidate is first compiled and run in worker processes (in parallel, each with a time limit), then all that
survived are timed in turn. Nothing is written: rows go into backends/fa2/tiles.py by hand.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from speedlight import launch
from speedlight.backends import fa2
from speedlight.backends.fa2.tiles import Tile
from speedlight.problem import describe

TOKENS, HIDDEN = 16384, 2048
CANDIDATES = {
    ("fwd", 64): "128x64x4x3 128x64x8x3 64x64x4x3 128x64x4x4",
    ("fwd", 128): "128x64x8x3 128x128x8x3 64x64x4x3",
    ("fwd", 256): "64x64x4x2 128x64x8x2 64x32x4x3 64x64x8x2 128x32x8x3 64x64x4x1",
    ("dkdv", 64): "64x128x8x3 64x64x4x3 32x128x4x3 64x64x4x4",
    ("dkdv", 128): "64x128x8x3 32x64x4x3 32x128x8x3 64x128x8x2",
    ("dkdv", 256): "32x64x8x1 32x64x8x2 64x64x8x1 32x64x4x1 32x128x8x1 64x32x4x1",
    ("dq", 64): "128x64x4x3 64x64x4x3 128x64x4x4",
    ("dq", 128): "128x64x8x3 128x32x8x3 64x64x4x2",
    ("dq", 256): "64x32x8x1 64x32x4x2 128x32x8x1 64x32x8x2 64x64x8x1 32x64x4x1",
}


def parse(text: str) -> Tile:
    return Tile(*map(int, text.split("x")))


def launcher(kernel: str, dim: int, causal: bool, seqlen: int, dtype: torch.dtype, tokens: int = TOKENS):
    """A function of a tile that launches the kernel once on random inputs."""
    batch, heads = max(1, tokens // seqlen), HIDDEN // dim
    q, k, v, dout = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype) for _ in range(4))
    problem, inputs = describe(q, k, v, causal=causal)
    out, lse = fa2.forward(problem, inputs)
    delta, dq, dk, dv = torch.zeros_like(lse), *(torch.empty_like(t) for t in (q, k, v))
    forward = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    backward = {**forward, "dout": dout, "delta": delta, "dq": dq, "dk": dk, "dv": dv}
    tensors, build = {
        "fwd": (forward, fa2.forward_launch), "dkdv": (backward, fa2.dkdv_launch), "dq": (backward, fa2.dq_launch),
    }[kernel]  # fmt: skip

    def launched(tile: Tile) -> None:
        launch.run((kernel, problem, tile), problem.device, tensors, lambda: build(problem, tensors, tile))

    return launched


def try_one(kernel: str, dim: int, causal: bool, dtype: str, tile: str, limit: float) -> bool:
    arguments = json.dumps([kernel, dim, causal, dtype, tile])
    try:
        run = subprocess.run([sys.executable, __file__, "--worker", arguments], capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def worker(arguments: str) -> None:
    kernel, dim, causal, dtype, tile = json.loads(arguments)
    launcher(kernel, dim, causal, 256, getattr(torch, dtype), 512)(parse(tile))
    torch.cuda.synchronize()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kernels", default="fwd,dkdv,dq")
    ap.add_argument("--dims", default="64,128")
    ap.add_argument("--seqlens", default="1024,4096,16384")
    ap.add_argument("--causal", default="0,1")
    ap.add_argument("--dtype", default="bfloat16")
    ap.add_argument("--candidates", help="tiles as block_m x block_n x num_warps x num_stages, comma-separated")
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
    cells = list(
        itertools.product(
            args.kernels.split(","), map(int, args.dims.split(",")), (c == "1" for c in args.causal.split(","))
        )
    )
    names = {
        cell: args.candidates.split(",") if args.candidates else CANDIDATES[cell[0], cell[1]].split() for cell in cells
    }
    tasks = [(*cell, args.dtype, tile) for cell in cells for tile in names[cell]]
    with ThreadPoolExecutor(args.jobs) as pool:
        alive = dict(zip(tasks, pool.map(lambda t: try_one(*t, args.compile_limit), tasks), strict=True))
    for task in tasks:
        if not alive[task]:
            print("failed:", task)
    for kernel, dim, causal in cells:
        speeds: dict[str, list[float]] = {}
        for seqlen in map(int, args.seqlens.split(",")):
            run = launcher(kernel, dim, causal, seqlen, getattr(torch, args.dtype))
            flops = 4 * TOKENS * seqlen * HIDDEN * (0.5 if causal else 1) * {"fwd": 1, "dkdv": 2, "dq": 1.5}[kernel]
            tiles = [t for t in names[kernel, dim, causal] if alive[kernel, dim, causal, args.dtype, t]]
            times: dict[str, list[float]] = {t: [] for t in tiles}
            for _, tile in itertools.product(range(args.rounds), tiles):
                call = functools.partial(run, parse(tile))
                times[tile].append(triton.testing.do_bench(call, 2, 12, return_mode="median"))
            for tile in tiles:
                speeds.setdefault(tile, []).append(flops / statistics.median(times[tile]) / 1e9)
        print(f"{kernel} D{dim} {'causal' if causal else 'full'}: TFLOP/s at S = {args.seqlens}")
        for tile, values in sorted(speeds.items(), key=lambda kv: -math.prod(kv[1])):
            print(f"  {tile:<14}", " ".join(f"{x:6.0f}" for x in values))


if __name__ == "__main__":
    main()
