"""Train the same model twice, step by step in turn: once with Speedlight, once with standard attention.

Both start from the same seed and see the same batches, so that every difference between the two curves is rounding. The
steps alternate because a machine's speed drifts: taken in turn, both methods meet the same weather.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .genome import UNKNOWN
from .model import METHODS, Attend, ModelConfig, NucleotideModel

LEARNING_RATE = 1e-3
VALIDATION_SHARE = 0.1
MAX_VALIDATION_WINDOWS = 4
VALIDATIONS = 4
MIN_STEPS, MAX_STEPS = 6, 2_000
MARKOV_ORDER = 3
NATS_TO_BITS = 1 / math.log(2)


@dataclass
class Run:
    """One training: loss in bits per nucleotide and duration in seconds of each step, validation loss by step."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    first_call_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)


@dataclass
class Training:
    """Both runs with what they share. `markov_bits` is what a simple chain reaches on the same validation part."""

    config: ModelConfig
    dtype: str
    parameters: int
    train_length: int
    validation_length: int
    markov_bits: float
    runs: dict[str, Run]

    @property
    def steps(self) -> int:
        return len(self.runs["standard"].losses)

    @property
    def differences(self) -> list[float]:
        """|loss with Speedlight - loss with standard attention| of each step, in bits per nucleotide."""
        pairs = zip(self.runs["speedlight"].losses, self.runs["standard"].losses, strict=True)
        return [abs(a - b) for a, b in pairs]

    def tokens_per_second(self, method: str) -> float:
        """Nucleotides trained on in a second of the method's own steps."""
        return self.steps * self.config.context * self.config.batch / self.runs[method].seconds

    @property
    def speedup(self) -> float:
        """Standard attention's training time over Speedlight's; below 1 Speedlight is the slower one."""
        return self.runs["standard"].seconds / self.runs["speedlight"].seconds


class Trainer:
    """A model with one kind of attention, its optimizer and its record."""

    def __init__(
        self, config: ModelConfig, attend: Attend, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = NucleotideModel(config, attend).to(device)
        self.device, self.dtype = device, dtype
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.run = Run()

    def loss(self, window: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.model.loss(window)

    def step(self, window: Tensor, learning_rate: float) -> float:
        """One optimizer step on a window (B, S + 1); returns its duration in seconds."""
        synchronize(self.device)
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        self.run.losses.append(loss.item() * NATS_TO_BITS)
        self.run.step_seconds.append(seconds)
        return seconds

    @torch.no_grad()
    def validate(self, windows: list[Tensor]) -> None:
        losses = [self.loss(window).item() for window in windows]
        self.run.validation.append((len(self.run.losses), sum(losses) / len(losses) * NATS_TO_BITS))


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit_context(config: ModelConfig, length: int) -> ModelConfig:
    """Shorten the context to a power of two that fits the validation part of a genome of `length` tokens."""
    room = int(length * VALIDATION_SHARE) - 1
    context = min(config.context, 2 ** int(math.log2(room)))
    return ModelConfig(config.layers, config.heads, config.head_dim, context, config.batch)


def markov_bits(train: Tensor, held_out: Tensor, order: int = MARKOV_ORDER) -> float:
    """Bits per nucleotide of an order-k Markov chain counted on `train` (add-one smoothed) and read on `held_out`."""

    def words(tokens: Tensor) -> Tensor:
        known = tokens.long().unfold(0, order + 1, 1)
        known = known[(known != UNKNOWN).all(1)]
        return known @ (4 ** torch.arange(order, -1, -1))

    counts = torch.bincount(words(train), minlength=4 ** (order + 1)).view(-1, 4) + 1.0
    bits = -(counts / counts.sum(1, keepdim=True)).log2().flatten()
    return bits[words(held_out)].mean().item()


class Windows:
    """Windows of a genome: random ones from its first 90 %, fixed ones from the rest."""

    def __init__(self, tokens: Tensor, config: ModelConfig, device: torch.device, seed: int) -> None:
        split = len(tokens) - int(len(tokens) * VALIDATION_SHARE)
        self.train, self.held_out = tokens[:split], tokens[split:]
        self.config, self.device = config, device
        self.generator = torch.Generator().manual_seed(seed)

    def sample(self) -> Tensor:
        """A training batch (B, context + 1)."""
        size = self.config.context + 1
        starts = torch.randint(len(self.train) - size + 1, (self.config.batch,), generator=self.generator)
        return self._move(torch.stack([self.train[start : start + size] for start in starts.tolist()]))

    def validation(self) -> list[Tensor]:
        """Windows (1, context + 1) that follow each other in the held-out part."""
        size = self.config.context + 1
        starts = range(0, len(self.held_out) - size + 1, self.config.context)[:MAX_VALIDATION_WINDOWS]
        return [self._move(self.held_out[None, start : start + size]) for start in starts]

    def _move(self, window: Tensor) -> Tensor:
        return window.to(self.device, torch.long)


def calibrate(
    config: ModelConfig, window: Tensor, device: torch.device, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """Seconds of (first step, later step) of each method, on models that are thrown away."""
    measured = {}
    for name, attend in METHODS.items():
        trainer = Trainer(config, attend, device, dtype, seed=0)
        first, *later = (trainer.step(window, LEARNING_RATE) for _ in range(3))
        measured[name] = first, min(later)
    return measured


def train_both(
    tokens: Tensor,
    config: ModelConfig,
    seconds: float,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    on_start: Callable[[int], None] = lambda steps: None,
    on_step: Callable[[dict[str, Run]], None] = lambda runs: None,
) -> tuple[Training, dict[str, NucleotideModel]]:
    """Train with both methods for about `seconds` in all: the slower one gets half, and both take as many steps.

    `on_start` gets the number of steps, `on_step` both runs after each step.
    """
    config = fit_context(config, len(tokens))
    windows = Windows(tokens, config, device, seed)
    held_out = windows.validation()
    calibration = calibrate(config, windows.sample(), device, dtype)
    steps = int(seconds / 2 / max(later for _, later in calibration.values()))
    steps = min(max(steps, MIN_STEPS), MAX_STEPS)
    on_start(steps)

    trainers = {name: Trainer(config, attend, device, dtype, seed) for name, attend in METHODS.items()}
    runs = {name: trainer.run for name, trainer in trainers.items()}
    for name, run in runs.items():
        run.first_call_seconds = calibration[name][0]
    # A machine that became slow after the calibration must not make the demo endless.
    deadline = time.monotonic() + 1.5 * seconds
    for step in range(steps):
        if step % math.ceil(steps / VALIDATIONS) == 0:
            _validate(trainers, held_out)
        window, learning_rate = windows.sample(), LEARNING_RATE * _schedule(step, steps)
        for trainer in trainers.values():
            trainer.step(window, learning_rate)
        on_step(runs)
        if time.monotonic() > deadline and step + 1 >= MIN_STEPS:
            break
    _validate(trainers, held_out)

    models = {name: trainer.model for name, trainer in trainers.items()}
    training = Training(
        config=config,
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in models["standard"].parameters()),
        train_length=len(windows.train),
        validation_length=len(windows.held_out),
        markov_bits=markov_bits(windows.train, windows.held_out),
        runs=runs,
    )
    return training, models


def _validate(trainers: dict[str, Trainer], held_out: list[Tensor]) -> None:
    for trainer in trainers.values():
        trainer.validate(held_out)


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))
