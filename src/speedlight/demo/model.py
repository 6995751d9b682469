"""A small causal transformer over nucleotides whose attention is a parameter.

Shapes: batch B, sequence S, heads H, head dim D; attention takes and gives (B, S, H, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import speedlight

from .genome import UNKNOWN, VOCABULARY

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def speedlight_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, the backend chosen by Speedlight."""
    out = speedlight.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(Q K^T / sqrt(D)) V as a textbook writes it: the (S, S) scores are held in memory."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(future_mask(q.shape[-2], q.device), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


@lru_cache(maxsize=1)
def future_mask(seqlen: int, device: torch.device) -> Tensor:
    """(S, S), True where the key lies in the query's future. Kept, so that standard attention pays for it once."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)


METHODS: dict[str, Attend] = {"speedlight": speedlight_attention, "standard": standard_attention}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; `context` is the window in nucleotides, `batch` the windows a step."""

    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    context: int = 2048
    batch: int = 1

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: turn the pairs (x[i], x[i + D/2]) of x (B, S, H, D) by angles (S, D/2), in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        width = config.width
        self.heads, self.attend = config.heads, attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(2)
        out = self.attend(rotate(q, angles), rotate(k, angles), v)
        x = x + self.proj(out.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class NucleotideModel(nn.Module):
    """Tokens (B, S) -> logits (B, S, 4) of the next nucleotide."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(len(VOCABULARY), config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, len(VOCABULARY) - 1)

    def set_attention(self, attend: Attend) -> None:
        """Compute every block's attention with `attend` from now on."""
        for block in self.blocks:
            setattr(block, "attend", attend)  # noqa: B010

    def forward(self, tokens: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        frequency = 10_000.0 ** -(torch.arange(half, device=tokens.device) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))

    def loss(self, window: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per nucleotide, of a window (B, S + 1); unknown targets do not count."""
        target = window[:, 1:].flatten()
        logits = self(window[:, :-1]).flatten(0, 1).float()
        total = F.cross_entropy(logits, target, ignore_index=UNKNOWN, reduction="sum")
        return total / (target != UNKNOWN).sum().clamp(min=1)
