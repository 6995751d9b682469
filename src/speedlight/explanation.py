"""Saying which backend serves a call, with which tile, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import select
from .problem import AttentionProblem, describe
from .target import Target, target_of


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``refused`` maps each other backend to its reason."""

    backend: str
    tile: str
    target: Target
    refused: dict[str, str]
    problem: AttentionProblem

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.target}, {self.tile}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, *varlen: Any, **options: Any) -> Explanation:
    """Tell what :func:`attention`, or with cu_seqlens :func:`attention_varlen`, would do with the same arguments.

    Raises what the call itself would raise for arguments that do not fit or that no backend serves.
    """
    requested = options.pop("backend", None)
    for name in ("return_lse", "generator"):
        options.pop(name, None)
    problem, _ = describe(q, k, v, *varlen, **options)
    target = target_of(problem.device)
    choice = select.choose(problem, requested)
    refused = {}
    for name in select.BACKENDS:
        if name == choice.name:
            continue
        module, reason = select.load(name, target)
        reason = reason or module.supports(problem, target)
        if reason is None:
            reason = f"backend={requested!r} was asked for" if requested else _lower_in_order(name, choice.name)
        refused[name] = reason
    return Explanation(choice.name, choice.module.describe_tile(problem, target), target, refused, problem)


def _lower_in_order(name: str, chosen: str) -> str:
    if name not in select.AUTOMATIC:
        return "runs only when asked for"
    return f"could serve this problem, but {chosen} comes first"
