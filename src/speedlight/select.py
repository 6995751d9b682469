"""Which backend serves a problem: the first of an ordered tuple that does not refuse."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from .errors import UnsupportedError
from .problem import AttentionProblem
from .target import Target, target_of, triton_problem

BACKENDS = ("cpu", "fa1", "fa2", "fa3")
# Tried in this order when the caller asks for none. `fa1`, which is for study, runs only when asked for.
AUTOMATIC = ("fa3", "fa2", "cpu")


@dataclass(frozen=True)
class Choice:
    name: str
    module: ModuleType
    refused: tuple[tuple[str, str], ...]  # (backend, reason) of those tried before


_CHOICES: dict[tuple[AttentionProblem, str | None], Choice] = {}
_CHOICES_LIMIT = 4096


def choose(problem: AttentionProblem, requested: str | None) -> Choice:
    """The backend for ``problem`` on its own device.

    Raises:
        ValueError: ``requested`` is not a backend's name.
        UnsupportedError: the requested backend refuses, or all do; the message gives the reasons.
    """
    choice = _CHOICES.get((problem, requested))
    if choice is None:
        choice = choose_for(problem, target_of(problem.device), requested)
        if len(_CHOICES) >= _CHOICES_LIMIT:
            _CHOICES.clear()
        _CHOICES[problem, requested] = choice
        if requested is None and choice.name == "cpu" and problem.device.type == "cuda":
            _warn_slow(choice.refused)
    return choice


def choose_for(problem: AttentionProblem, target: Target, requested: str | None) -> Choice:
    """As :func:`choose`, for any target, by name: needs no such device."""
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS} or None, got {requested!r}")
    refused: list[tuple[str, str]] = []
    for name in AUTOMATIC if requested is None else (requested,):
        module, reason = load(name, target)
        reason = reason or module.supports(problem, target)
        if reason is None:
            return Choice(name, module, tuple(refused))
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise UnsupportedError(f"no backend can serve this problem on {target} ({reasons})")


def load(name: str, target: Target) -> tuple[ModuleType, str | None]:
    """A backend's module and None, or an empty module and why it cannot run on ``target``. Only here is Triton
    imported."""
    if name != "cpu" and target.kind == "torch":
        return ModuleType(name), _why_no_triton()
    if name == "fa3" and target.kind == "interpreter":
        return ModuleType(name), "Triton's interpreter does not run Gluon"
    return import_module(f".backends.{name}", __package__), None


def _why_no_triton() -> str:
    return triton_problem() or "it needs a GPU (or TRITON_INTERPRET=1: Triton's interpreter on CPU tensors)"


_warned: set[str] = set()


def _warn_slow(refused: tuple[tuple[str, str], ...]) -> None:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    if reasons not in _warned:
        _warned.add(reasons)
        warnings.warn(
            f"speedlight: this problem runs on the GPU through the `cpu` backend's torch operations, exact but slow "
            f"({reasons}; said once)",
            stacklevel=6,
        )
