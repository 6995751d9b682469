"""Compile every kernel for every combination of options, dtype, head dimension and target, without a GPU.

    python tools/compile_all.py [--targets sm_90,gfx942] [--dims 64,128] [--dtypes bfloat16] [--shard 2/8] [--jobs 2]

The checks of ``make test`` compile each tile row with all options off and with all on; this is the product of them all,
which takes about a day on two cores. Fails if a kernel does not compile or needs more shared memory than the target
has; prints the worst spills of each target, so that a row that is bad in some combination shows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests/compile", "src")]

from lowering import TARGETS, Variant, compile_code, launches  # noqa: E402

from speedlight.backends.contract import Needs  # noqa: E402
from speedlight.target import Target  # noqa: E402

DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float32", "tf32")
WINDOWS = {"": {}, "causal": dict(causal=True), "left": dict(window=(100, None)), "both": dict(window=(100, 50))}
NEEDS = {"": Needs(), "q": Needs(True, False, False), "k": Needs(False, True, False), "v": Needs(False, False, True)}


def variants(dims: list[int], dtypes: list[str]) -> Iterator[Variant]:
    """The product. Options that reach only some kernels are not multiplied with each other's."""
    for dim, dtype, window, softcap, varlen, seqused, group, shape in itertools.product(
        dims, dtypes, WINDOWS, (0.0, 5.0), (False, True), (False, True), (1, 2), ("full", "aligned", "unaligned")
    ):
        head_dim, head_dim_v = {"full": (dim, dim), "aligned": (dim - 8, dim), "unaligned": (dim - 1, dim - 3)}[shape]
        base = dict(
            head_dim=head_dim, head_dim_v=head_dim_v, dtype=torch.float32 if dtype == "tf32" else getattr(torch, dtype),
            varlen=varlen, seqused=seqused, group_size=group, tf32=dtype == "tf32",
            options=dict(softcap=softcap, **WINDOWS[window]),
        )  # fmt: skip
        parts = (dtype, f"{head_dim}x{head_dim_v}", window, softcap and "softcap", varlen and "varlen",
                 seqused and "seqused", group > 1 and "gqa")  # fmt: skip
        name = " ".join(str(part) for part in parts if part)
        yield Variant(name, seqlen=4096, **base)
        yield Variant(f"{name} ragged dlse", seqlen=4091, dlse=True, **base)
        if not (softcap or seqused or varlen):
            for needs in list(NEEDS)[1:]:
                yield Variant(f"{name} d{needs}", needs=NEEDS[needs], **base)


def compile_one(backend: str, target: Target, variant: Variant) -> list[tuple[str, int, str]]:
    """(kernel, spills, complaint) of each kernel."""
    from speedlight import select

    module, _ = select.load(backend, target)
    found = launches(module, target, variant)
    if isinstance(found, str):
        return []
    results = []
    for name, record in found.items():
        try:
            code = compile_code(record, target)
        except Exception as error:  # whatever the compiler raises is the finding
            results.append((name, 0, f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        over = code.shared > target.shared_memory
        complaint = f"{code.shared} bytes of shared memory, of {target.shared_memory}" if over else ""
        results.append((name, code.spills, complaint))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    parser.add_argument("--backends", default="fa2,fa1")
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--shard", default="1/1", help="n/m: the n-th of m parts")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    targets = [Target.parse(name) for name in args.targets.split(",")]
    every = list(
        itertools.product(
            args.backends.split(","), targets, variants([int(d) for d in args.dims.split(",")], args.dtypes.split(","))
        )
    )
    part, parts = map(int, args.shard.split("/"))
    every = every[part - 1 :: parts]
    worst: dict[tuple[str, str, str], tuple[int, str]] = {}
    compiled = complaints = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(args.jobs) as pool:
            futures = {pool.submit(compile_one, *call): call for call in every}
            for done, future in enumerate(as_completed(futures), 1):
                backend, target, variant = futures[future]
                for kernel, spills, complaint in future.result():
                    compiled += 1
                    if complaint:
                        complaints += 1
                        print(f"{backend} {target} {kernel}, {variant.name}: {complaint}", flush=True)
                    key = (backend, str(target), kernel)
                    worst[key] = max(worst.get(key, (-1, "")), (spills, variant.name))
                if done % 100 == 0:
                    left = (time.monotonic() - started) / done * (len(every) - done)
                    print(f"{done} of {len(every)} calls, about {left / 60:.0f} minutes left", file=sys.stderr)
    for (backend, target, kernel), (spills, name) in sorted(worst.items()):
        print(f"{backend} {target:<7} {kernel:<10} worst spills {spills:5}  ({name})")
    print(f"{compiled} kernels of {len(every)} calls compiled, {complaints} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
