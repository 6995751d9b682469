"""From user arguments to the one normal form, ``AttentionProblem``, and the checked tensors, ``Inputs``.

All validation is here. A problem is frozen, hashable and holds no tensors: selection, tiles and launch plans are
functions of it. Equal problems are the same object as long as they stay in the cache, so a lookup by problem is cheap.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .backends.contract import Inputs
from .modifiers import Axis, Bias, Mask

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DROPOUT_LEVELS = 1 << 16  # a drop decision compares 16 random bits with a threshold

Window = tuple[int | None, int | None]


@dataclass(frozen=True, eq=True)
class TensorSpec:
    """Shape and dtype of an optional 4-D bias or mask."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call without its tensors.

    In varlen ``seqlen_q`` and ``seqlen_k`` are the token totals, which bound every sequence's length, and ``batch``
    is the number of sequences. Windows are normal: ``causal`` is folded into ``window_right``, and a side too wide to
    hide anything is None.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    varlen: bool
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    alibi_batched: bool | None  # None: no ALiBi; False: slopes (H,); True: slopes (B, H)
    bias: TensorSpec | None
    mask: TensorSpec | None
    bias_fn: Callable[..., Any] | None
    bias_axes: tuple[Axis, ...]
    mask_fn: Callable[..., Any] | None
    mask_axes: tuple[Axis, ...]
    sink: bool
    seqused_q: bool
    seqused_k: bool
    dropout_threshold: int  # drop where 16 random bits are below it; 0: no dropout
    deterministic: bool
    max_seqlen_q: int | None  # varlen: the caller's word for the longest sequence, a hint that no result depends on
    max_seqlen_k: int | None
    fp32_precision: str  # "ieee" or "tf32", for fp32 inputs on tensor cores
    plain: bool = field(default=False, init=False, repr=False, compare=False)  # q, k and v are the only tensors
    trivial: bool = field(default=False, init=False, repr=False, compare=False)  # no row has a logit: out is 0 or empty
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = self.__dataclass_fields__.keys() - {"plain", "trivial", "_hash"}
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in sorted(names))))
        options = (
            self.varlen, self.seqused_q, self.seqused_k, self.sink, self.dropout_threshold > 0,
            self.alibi_batched is not None, self.bias or self.bias_fn, self.mask or self.mask_fn,
        )  # fmt: skip
        object.__setattr__(self, "plain", not any(options))
        empty = self.batch == 0 or self.seqlen_q == 0 or self.num_heads == 0
        object.__setattr__(self, "trivial", empty or (self.seqlen_k == 0 and not self.sink))

    def __hash__(self) -> int:
        return self._hash

    @property
    def group_size(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_heads_kv

    @property
    def causal(self) -> bool:
        return self.window_left is None and self.window_right == 0

    @property
    def has_bias(self) -> bool:
        return self.bias is not None or self.bias_fn is not None

    @property
    def hides(self) -> bool:
        """Whether pairs are hidden by value: by a mask, or by a bias of -inf."""
        return self.has_bias or self.mask is not None or self.mask_fn is not None

    @property
    def has_terms(self) -> bool:
        """Whether anything is added to scores or hides them, besides a window."""
        return self.alibi_batched is not None or self.hides

    @property
    def keep_scale(self) -> float:
        """1 / P(keep), from the probability that the threshold realises."""
        return DROPOUT_LEVELS / (DROPOUT_LEVELS - self.dropout_threshold)

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        rows = (self.seqlen_q,) if self.varlen else (self.batch, self.seqlen_q)
        return (*rows, self.num_heads, self.head_dim_v)

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.num_heads, self.seqlen_q)
        return (self.batch, self.num_heads, self.seqlen_q)

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32


_PROBLEMS: dict[Any, AttentionProblem] = {}
_PROBLEMS_LIMIT = 4096


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | Bias | None = None,
    mask: Tensor | Mask | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[AttentionProblem, Inputs]:
    """Check every argument of a call and put it in normal form.

    Raises:
        TypeError, ValueError: naming the argument and the values that do not fit.
    """
    if type(deterministic) is not bool:
        raise TypeError(f"deterministic must be a bool, got {type(deterministic).__name__}")
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    dtype = q.dtype
    # True == 1 == 1.0: what validation tells apart must not look alike here.
    key: Any = (
        q.shape, k.shape, v.shape, dtype, k.dtype, v.dtype, q.device, k.device, v.device, deterministic,
        softmax_scale, type(softmax_scale), causal, type(causal), softcap, type(softcap),
        None if type(window) is tuple and window == (None, None) else _facts(window),
        _fp32_precision() if dtype is torch.float32 else None,
    )  # fmt: skip
    if not (
        cu_seqlens_q is None and cu_seqlens_k is None and max_seqlen_q is None and max_seqlen_k is None
        and alibi_slopes is None and bias is None and mask is None and sink is None and seqused_q is None
        and seqused_k is None and dropout_seed is None and type(dropout_p) is float and dropout_p == 0
    ):  # fmt: skip
        rest = (
            cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, mask, sink, seqused_q, seqused_k, dropout_seed, dropout_p,
            None if isinstance(max_seqlen_q, Tensor) else max_seqlen_q,  # a tensor's shape says nothing either
            None if isinstance(max_seqlen_k, Tensor) else max_seqlen_k,
        )  # fmt: skip
        key = (key, *map(_facts, rest))
    try:
        problem = _PROBLEMS.get(key)
    except TypeError:  # something unhashable where a number belongs: let validation name it
        problem = None
    if problem is None:
        problem = _validate(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap,
            alibi_slopes, bias, mask, sink, seqused_q, seqused_k, dropout_p, dropout_seed, deterministic,
        )  # fmt: skip
        if len(_PROBLEMS) >= _PROBLEMS_LIMIT:
            _PROBLEMS.clear()
        problem = _PROBLEMS.setdefault(key, problem)

    if q.stride()[-1] != 1 or k.stride()[-1] != 1 or v.stride()[-1] != 1:  # stride(-1) takes longer
        q, k, v = _unit_stride(q, "q"), _unit_stride(k, "k"), _unit_stride(v, "v")
    if problem.plain:
        return problem, Inputs(q, k, v)

    inputs = Inputs(
        q, k, v,
        _int32(cu_seqlens_q), _int32(cu_seqlens_k), _int32(seqused_q), _int32(seqused_k),
        alibi_slopes,
        _four_dims(bias) if isinstance(bias, Tensor) else None,
        _four_dims(mask) if isinstance(mask, Tensor) else None,
        sink,
        dropout_seed if problem.dropout_threshold else None,
        tuple(t for _, t in mask.aux) if isinstance(mask, Mask) else (),
        tuple(t for _, t in bias.aux) if isinstance(bias, Bias) else (),
    )  # fmt: skip
    if q.device.type == "cpu":
        _check_lengths(problem, inputs)
    return problem, inputs


def _facts(x: Any) -> Any:
    """What validation looks at."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device
    if isinstance(x, Mask | Bias):
        return x.fn, tuple((axis, t.shape, t.device) for axis, t in x.aux)
    if isinstance(x, tuple | list):
        return tuple(map(_facts, x))
    return x, type(x)


def _fp32_precision() -> str:
    matmul = torch.backends.cuda.matmul
    try:
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    except AttributeError:
        return "tf32" if matmul.allow_tf32 else "ieee"


_warned_copy = False


def _unit_stride(t: Tensor, name: str) -> Tensor:
    if t.stride(-1) == 1 or t.shape[-1] <= 1:
        return t
    global _warned_copy
    if not _warned_copy:
        _warned_copy = True
        warnings.warn(
            f"speedlight: {name} has stride {t.stride(-1)} along the head dimension and is copied; "
            "store the head dimension contiguously to avoid this (said once)",
            stacklevel=4,
        )
    return t.contiguous()


def _int32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(torch.int32).contiguous()


def _four_dims(t: Tensor) -> Tensor:
    return t if t.dim() == 4 else t[(None,) * (4 - t.dim())]


def _check_lengths(p: AttentionProblem, inputs: Inputs) -> None:
    """Values of cu_seqlens and seqused. On the CPU only: elsewhere reading them would synchronise, and the kernels
    clamp them instead."""
    for side, cu, used, total, longest in (
        ("q", inputs.cu_seqlens_q, inputs.seqused_q, p.seqlen_q, p.max_seqlen_q),
        ("k", inputs.cu_seqlens_k, inputs.seqused_k, p.seqlen_k, p.max_seqlen_k),
    ):
        if cu is not None:
            lengths = cu[1:] - cu[:-1]
            if int(cu[0]) != 0 or (lengths < 0).any() or int(cu[-1]) > total:
                raise ValueError(
                    f"cu_seqlens_{side} must start at 0, never decrease and end at or before the {total} tokens of "
                    f"{side}, got {cu[:16].tolist()}{'...' if len(cu) > 16 else ''}"
                )
            if longest is not None and len(lengths) and int(lengths.max()) > longest:
                raise ValueError(f"max_seqlen_{side} is {longest}, but a sequence has {int(lengths.max())} tokens")
        if used is not None and len(used):
            limit = (cu[1:] - cu[:-1]) if cu is not None else torch.full_like(used, total)
            if (used < 0).any() or (used > limit).any():
                raise ValueError(
                    f"seqused_{side} must lie between 0 and the sequence lengths, got {used.tolist()[:16]} for lengths "
                    f"{limit.tolist()[:16]}"
                )


def _validate(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    softmax_scale: Any, causal: Any, window: Any, softcap: Any, alibi_slopes: Any, bias: Any, mask: Any, sink: Any,
    seqused_q: Any, seqused_k: Any, dropout_p: Any, dropout_seed: Any, deterministic: bool,
) -> AttentionProblem:  # fmt: skip
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    dims, layout = (3, "(T, heads, dim)") if varlen else (4, "(B, S, heads, dim)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions {layout}, got shape {tuple(t.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v must be float32, float64, bfloat16 or float16, got {q.dtype}")
    for name, t in (("k", k), ("v", v)):
        _same_device(name, t, q)

    num_heads, head_dim = q.shape[-2:]
    num_heads_kv, head_dim_v = k.shape[-2], v.shape[-1]
    if k.shape[-1] != head_dim:
        raise ValueError(f"k must have q's head dimension {head_dim}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have k's shape up to the head dimension, {tuple(k.shape[:-1])}, got {tuple(v.shape[:-1])}"
        )
    if not varlen and k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}")
    if num_heads_kv == 0 and num_heads == 0:
        num_heads_kv = num_heads = 0
    elif num_heads_kv == 0 or num_heads % num_heads_kv:
        raise ValueError(f"q's heads must be a multiple of k's heads, got {num_heads} and {num_heads_kv}")
    if head_dim == 0:
        raise ValueError("q must have a head dimension of at least 1, got 0")

    if varlen:
        for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if t is None:
                raise ValueError(f"{name} is missing: varlen needs both cu_seqlens_q and cu_seqlens_k")
            _vector_of_ints(name, t, q)
            if t.shape[0] < 1:
                raise ValueError(f"{name} must have B + 1 entries, got 0")
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must have the same length B + 1, got "
                f"{cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
            )
        batch, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    for name, t in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if t is not None:
            _vector_of_ints(name, t, q)
            if t.shape[0] != batch:
                raise ValueError(f"{name} must have one entry per sequence, {batch}, got {t.shape[0]}")
    longest: list[int | None] = []
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if n is None or isinstance(n, Tensor):
            longest.append(None)  # reading a tensor would synchronise; no result depends on it
        elif isinstance(n, int) and not isinstance(n, bool) and n >= 0:
            longest.append(n)
        else:
            raise ValueError(f"{name} must be a non-negative int, a tensor or None, got {n!r}")

    scale = head_dim**-0.5 if softmax_scale is None else _number("softmax_scale", softmax_scale)
    softcap = _number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (off) or positive, got {softcap}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    left, right = check_window(window)
    if causal:
        right = 0
    # The farthest visible key lies seqlen_k - 1 to the left, and seqlen_q - 1 to the right, of a query's position.
    left = None if left is None or left >= seqlen_k - 1 else left
    right = None if right is None or right >= max(seqlen_q - 1, 0) else right

    alibi_batched = None
    if alibi_slopes is not None:
        _tensor("alibi_slopes", alibi_slopes, q)
        if alibi_slopes.dtype is not torch.float32:
            raise TypeError(f"alibi_slopes must be float32, got {alibi_slopes.dtype}")
        if tuple(alibi_slopes.shape) not in ((num_heads,), (batch, num_heads)):
            raise ValueError(
                f"alibi_slopes must have shape ({num_heads},) or ({batch}, {num_heads}), "
                f"got {tuple(alibi_slopes.shape)}"
            )
        alibi_batched = alibi_slopes.dim() == 2
    if sink is not None:
        _tensor("sink", sink, q)
        if tuple(sink.shape) != (num_heads,) or not sink.dtype.is_floating_point:
            raise ValueError(
                f"sink must be a float tensor of shape ({num_heads},), got {tuple(sink.shape)} {sink.dtype}"
            )

    scores = (batch, num_heads, max_seqlen_q, max_seqlen_k) if varlen else (batch, num_heads, seqlen_q, seqlen_k)
    bias_spec = mask_spec = None
    if isinstance(bias, Bias):
        _check_aux("bias", bias, q, num_heads, seqlen_q, seqlen_k)
    elif bias is not None:
        _tensor("bias", bias, q)
        if not bias.dtype.is_floating_point:
            raise TypeError(f"bias must be a float tensor or a Bias (a bool mask goes to mask=), got {bias.dtype}")
        bias_spec = TensorSpec(_broadcastable("bias", bias, scores, varlen), bias.dtype)
    if isinstance(mask, Mask):
        _check_aux("mask", mask, q, num_heads, seqlen_q, seqlen_k)
    elif mask is not None:
        _tensor("mask", mask, q)
        if mask.dtype is not torch.bool:
            raise TypeError(f"mask must be a bool tensor (True = visible) or a Mask, got {mask.dtype}")
        mask_spec = TensorSpec(_broadcastable("mask", mask, scores, varlen), mask.dtype)

    dropout_p = _number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if dropout_seed is not None:
        _tensor("dropout_seed", dropout_seed, q)
        if dropout_seed.dtype is not torch.int64 or dropout_seed.numel() != 1:
            raise ValueError(
                f"dropout_seed must be one int64 value, got {tuple(dropout_seed.shape)} {dropout_seed.dtype}"
            )

    return AttentionProblem(
        device=q.device, dtype=q.dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads,
        num_heads_kv=num_heads_kv, head_dim=head_dim, head_dim_v=head_dim_v, varlen=varlen, softmax_scale=scale,
        window_left=left, window_right=right, softcap=softcap, alibi_batched=alibi_batched, bias=bias_spec,
        mask=mask_spec, bias_fn=bias.fn if isinstance(bias, Bias) else None,
        bias_axes=bias.axes if isinstance(bias, Bias) else (), mask_fn=mask.fn if isinstance(mask, Mask) else None,
        mask_axes=mask.axes if isinstance(mask, Mask) else (), sink=sink is not None, seqused_q=seqused_q is not None,
        seqused_k=seqused_k is not None, dropout_threshold=min(round(dropout_p * DROPOUT_LEVELS), DROPOUT_LEVELS - 1),
        deterministic=deterministic, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
        fp32_precision=_fp32_precision() if q.dtype is torch.float32 else "ieee",
    )  # fmt: skip


def _number(name: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return float(x)


def check_window(window: Any) -> Window:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window must be a pair (left, right) of sizes or None, got {window!r}")
    for size in window:
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"window sizes must be ints or None, got {window!r}")
        if size < 0:
            raise ValueError(f"window sizes must not be negative (None means unlimited), got {window!r}")
    return window[0], window[1]


def _same_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {t.device}")


def _tensor(name: str, t: Any, q: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    _same_device(name, t, q)


def _vector_of_ints(name: str, t: Any, q: Tensor) -> None:
    _tensor(name, t, q)
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (int64 is converted), got {t.dtype}")
    if t.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(t.shape)}")


def _broadcastable(name: str, t: Tensor, scores: tuple[Any, ...], varlen: bool) -> tuple[int, ...]:
    """The 4-D shape of a bias or mask. In varlen its last two sizes bound the sequence lengths; where max_seqlen is an
    int they must reach it."""
    if t.dim() > 4:
        raise ValueError(f"{name} must broadcast to (B, H, Sq, Sk), got {t.dim()} dimensions")
    shape = (1,) * (4 - t.dim()) + tuple(t.shape)
    for axis, (size, full) in enumerate(zip(shape, scores, strict=True)):
        if size == 1 or size == full:
            continue
        if varlen and axis >= 2 and (not isinstance(full, int) or size >= full):
            continue
        raise ValueError(f"{name} must broadcast to (B, H, Sq, Sk) = {scores}, got shape {tuple(t.shape)}")
    return shape


def _check_aux(name: str, m: Mask | Bias, q: Tensor, num_heads: int, seqlen_q: int, seqlen_k: int) -> None:
    sizes = {"head": num_heads, "q": seqlen_q, "kv": seqlen_k}
    for n, (axis, t) in enumerate(m.aux):
        _same_device(f"{name}.aux[{n}]", t, q)
        if t.shape[0] != sizes[axis]:
            raise ValueError(f"{name}.aux[{n}] along {axis!r} must have {sizes[axis]} values, got {t.shape[0]}")
