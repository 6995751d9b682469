"""The only file that knows torch.library and autograd.

Two thin wrappers stand over the same two functions, ``run_forward`` and ``run_backward``. Plain eager tensors and
functorch go through an ``autograd.Function`` that calls the backend directly (little host time; vmap and
func.grad right). Under torch.compile, on tensor subclasses, fake tensors or under an active dispatch mode they go
through the custom ops, which Dynamo, AOT autograd, FLOP counters and selective checkpointing can see. One wrapper
cannot serve both: Dynamo rejects a Function that defines jvp, and a custom op alone answers jvp with a silent zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import select, selfcheck
from .backends.contract import Grads, Inputs, Needs
from .modifiers import Bias, Mask, function_from_name, function_name
from .problem import AttentionProblem, Window, check_window, describe

_TENSOR_FIELDS = Inputs._fields[:12]  # all but the two aux tuples
_DIFFERENTIABLE = tuple(_TENSOR_FIELDS.index(name) for name in Needs._fields)

_NO_SECOND_ORDER = (
    "speedlight.attention has no {what}. Use speedlight.reference.attention, the dense float64 definition in plain "
    "torch operations, which autograd can differentiate any number of times in both modes."
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None, max_seqlen_k: int | Tensor | None, backend: str | None,
    softmax_scale: float | None, causal: bool, window: Window, softcap: float, alibi_slopes: Tensor | None,
    bias: Tensor | Bias | None, mask: Tensor | Mask | None, sink: Tensor | None, seqused_q: Tensor | None,
    seqused_k: Tensor | None, dropout_p: float, dropout_seed: Tensor | None, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) with autograd, by the wrapper that fits the caller's situation."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v, alibi_slopes, bias, sink)
    compiling = torch.compiler.is_compiling()
    functorch = not compiling and torch._C._are_functorch_transforms_active()
    if compiling or (not functorch and _needs_dispatcher(q, k, v)):  # custom ops have no rules for func.grad and jvp
        return _call_op(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, backend, softmax_scale, causal, window,
            softcap, alibi_slopes, bias, mask, sink, seqused_q, seqused_k, dropout_p, dropout_seed, deterministic,
        )  # fmt: skip
    problem, inputs = describe(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap,
        alibi_slopes, bias, mask, sink, seqused_q, seqused_k, dropout_p, dropout_seed, deterministic,
    )  # fmt: skip
    choice = select.choose(problem, backend)
    if functorch or (torch.is_grad_enabled() and _requires_grad(inputs)):
        tensors = inputs[:3] if problem.plain else (*inputs[:12], *inputs.mask_aux, *inputs.bias_aux)
        return (_Attention.apply if functorch else _apply)(problem, choice.module, *tensors)
    return run_forward(problem, choice.module, inputs)


_PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})


def _needs_dispatcher(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not (type(q) in _PLAIN_TENSORS and type(k) in _PLAIN_TENSORS and type(v) in _PLAIN_TENSORS)


def _refuse_tangents(*tensors: Any) -> None:
    """Forward-mode AD outside functorch would pass by every wrapper and lose its tangents in silence."""
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        return  # _Attention.jvp speaks
    given = [t for t in tensors if isinstance(t, Tensor)]
    if compiling or any(forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise NotImplementedError(_NO_SECOND_ORDER.format(what="forward-mode derivative (jvp)"))


def _requires_grad(x: Inputs) -> bool:
    return (
        x.q.requires_grad or x.k.requires_grad or x.v.requires_grad
        or any(t is not None and t.requires_grad for t in (x.alibi_slopes, x.bias, x.sink))
    )  # fmt: skip


# The two functions under both wrappers


def run_forward(problem: AttentionProblem, backend: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    if problem.trivial:
        out = inputs.q.new_zeros(problem.out_shape)
        return out, inputs.q.new_full(problem.lse_shape, float("-inf"), dtype=problem.lse_dtype)
    out, lse = backend.forward(problem, inputs)
    if selfcheck.ENABLED:
        selfcheck.check_forward(problem, backend, inputs, out, lse)
    return out, lse


def run_backward(
    problem: AttentionProblem, backend: Any, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None,
    dlse: Tensor | None, needs: Needs,
) -> Grads:  # fmt: skip
    if problem.trivial or (dout is None and dlse is None):
        return Grads(*[torch.zeros_like(getattr(inputs, n)) if need else None for n, need in needs._asdict().items()])
    if dout is not None and dout.stride(-1) != 1:
        dout = dout.contiguous()  # an expanded gradient, as from out.sum()
    grads = backend.backward(problem, inputs, out, lse, dout, dlse, needs)
    if selfcheck.ENABLED:
        selfcheck.check_backward(problem, backend, inputs, out, lse, dout, dlse, needs, grads)
    return grads


# Eager and functorch


def _inputs(problem: AttentionProblem, tensors: Sequence[Tensor | None]) -> Inputs:
    if problem.plain:
        return Inputs(*tensors)  # type: ignore[arg-type]
    split = 12 + len(problem.mask_axes)
    return Inputs(*tensors[:12], tuple(tensors[12:split]), tuple(tensors[split:]))  # type: ignore[arg-type, call-arg]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(problem: AttentionProblem, backend: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return run_forward(problem, backend, _inputs(problem, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.problem, ctx.backend = inputs[:2]
        ctx.save_for_backward(*inputs[2:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        *tensors, out, lse = ctx.saved_tensors
        problem, needed = ctx.problem, ctx.needs_input_grad[2:]
        needs = Needs(*needed) if problem.plain else Needs(*[needed[n] for n in _DIFFERENTIABLE])
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            grads = _AttentionBackward.apply(problem, ctx.backend, needs, dout, dlse, out, lse, *tensors)
        else:
            grads = run_backward(problem, ctx.backend, _inputs(problem, tensors), out, lse, dout, dlse, needs)
        if problem.plain:
            return None, None, *grads[:3]
        result: list[Any] = [None] * (2 + len(tensors))
        for n, grad in zip(_DIFFERENTIABLE, grads, strict=True):
            result[2 + n] = grad
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_SECOND_ORDER.format(what="forward-mode derivative (jvp)"))

    @staticmethod
    def vmap(info: Any, in_dims: Any, problem: AttentionProblem, backend: Any, *tensors: Tensor | None) -> Any:
        return _map(info.batch_size, in_dims[2:], tensors, lambda *ts: _Attention.apply(problem, backend, *ts))


# Function.apply without its preparation for functorch, which inspects the signature anew on every call and takes longer
# than all the rest of the call on the host.
_apply = super(torch.autograd.Function, _Attention).apply


class _AttentionBackward(torch.autograd.Function):
    """The backward pass as a function of its own: functorch can map it, and differentiating it again says so."""

    @staticmethod
    def forward(problem: AttentionProblem, backend: Any, needs: Needs, *tensors: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        dout, dlse, out, lse, *rest = tensors
        return tuple(run_backward(problem, backend, _inputs(problem, tuple(rest)), out, lse, dout, dlse, needs))  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_NO_SECOND_ORDER.format(what="second derivative (double backward)"))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_SECOND_ORDER.format(what="forward-over-reverse derivative"))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, problem: AttentionProblem, backend: Any, needs: Needs, *tensors: Tensor | None
    ) -> Any:
        def one(*ts: Tensor | None) -> Any:
            return _AttentionBackward.apply(problem, backend, needs, *ts)

        return _map(info.batch_size, in_dims[3:], tensors, one)


def _map(size: int, dims: Any, tensors: tuple[Tensor | None, ...], function: Any) -> Any:
    """vmap by a loop: right for every option, whichever tensors carry the mapped dimension."""
    results = []
    for n in range(size):
        parts = [
            t if t is None or dim is None else t.select(dim, n) for t, dim in zip(tensors, dims, strict=True)
        ]  # fmt: skip
        results.append(function(*parts))
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if t is None else 0 for t in stacked)


# torch.compile, subclasses and dispatch modes

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? alibi_slopes, Tensor? bias, Tensor? mask, Tensor? sink, Tensor? dropout_seed, Tensor[] mask_aux, "
    "Tensor[] bias_aux, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "
    "SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, bool deterministic, str mask_function, "
    "str bias_function, str backend"
)
_NUM_ARGUMENTS = 26


def _call_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None, max_seqlen_k: int | Tensor | None, backend: str | None,
    softmax_scale: float | None, causal: bool, window: Window, softcap: float, alibi_slopes: Tensor | None, bias: Any,
    mask: Any, sink: Tensor | None, seqused_q: Tensor | None, seqused_k: Tensor | None, dropout_p: float,
    dropout_seed: Tensor | None, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    window = check_window(window)
    bias_is_function, mask_is_function = isinstance(bias, Bias), isinstance(mask, Mask)
    return torch.ops.speedlight.attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes,
        None if bias_is_function else bias, None if mask_is_function else mask, sink, dropout_seed,
        _aux_with_axes(mask) if mask_is_function else [], _aux_with_axes(bias) if bias_is_function else [],
        None if isinstance(max_seqlen_q, Tensor) else max_seqlen_q,
        None if isinstance(max_seqlen_k, Tensor) else max_seqlen_k,
        softmax_scale, causal, window[0], window[1], softcap, dropout_p, deterministic,
        _name_with_axes(mask) if mask_is_function else "", _name_with_axes(bias) if bias_is_function else "",
        backend or "",
    )  # fmt: skip


def _aux_with_axes(modifier: Mask | Bias) -> list[Tensor]:
    return [t for _, t in modifier.aux]


def _name_with_axes(modifier: Mask | Bias) -> str:
    return function_name(modifier.fn) + "".join(f",{axis}" for axis, _ in modifier.aux)


def _modifier(kind: type, name: str, aux: list[Tensor]) -> Any:
    function, *axes = name.split(",")
    return kind(function_from_name(function), list(zip(axes, aux, strict=True)))


def _describe_op(args: tuple[Any, ...]) -> tuple[AttentionProblem, Inputs, Any]:
    (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, bias, mask, sink, dropout_seed,
        mask_aux, bias_aux, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left, window_right, softcap,
        dropout_p, deterministic, mask_function, bias_function, backend,
    ) = args  # fmt: skip
    problem, inputs = describe(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window=(window_left, window_right), softcap=softcap, alibi_slopes=alibi_slopes,
        bias=_modifier(Bias, bias_function, bias_aux) if bias_function else bias,
        mask=_modifier(Mask, mask_function, mask_aux) if mask_function else mask, sink=sink, seqused_q=seqused_q,
        seqused_k=seqused_k, dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic,
    )  # fmt: skip
    return problem, inputs, select.choose(problem, backend or None).module


_FORWARD = "speedlight::attention_forward"
_BACKWARD = "speedlight::attention_backward"


@torch.library.custom_op(_FORWARD, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _forward_op(*args: Any) -> tuple[Tensor, Tensor]:
    problem, inputs, backend = _describe_op(args)
    return run_forward(problem, backend, inputs)


@_forward_op.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.custom_op(
    _BACKWARD,
    mutates_args=(),
    schema=f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, {_SCHEMA}) -> Tensor[]",
)
def _backward_op(dout: Any, dlse: Any, out: Tensor, lse: Tensor, needs: list[bool], *args: Any) -> list[Tensor]:
    problem, inputs, backend = _describe_op(args)
    grads = run_backward(problem, backend, inputs, out, lse, dout, dlse, Needs(*needs))
    # A 4-D view of a bias was differentiated; its gradient goes back in the shape that came in.
    return [g.reshape(args[n].shape).contiguous() for n, g in zip(_DIFFERENTIABLE, grads, strict=True) if g is not None]


@_backward_op.register_fake
def _backward_fake(dout: Any, dlse: Any, out: Tensor, lse: Tensor, needs: list[bool], *args: Any) -> list[Tensor]:
    return [args[n].new_empty(args[n].shape) for n, need in zip(_DIFFERENTIABLE, needs, strict=True) if need]


def _op_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, aux = inputs[:12], (*inputs[12], *inputs[13])
    ctx.save_for_backward(*tensors, *aux, *output)
    ctx.num_mask_aux, ctx.rest = len(inputs[12]), inputs[14:]
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    split = 12 + ctx.num_mask_aux
    args = (*tensors[:12], tensors[12:split], tensors[split:], *ctx.rest)
    split_sizes = (ctx.num_mask_aux, len(tensors) - split)
    needs = [bool(ctx.needs_input_grad[n]) for n in _DIFFERENTIABLE]
    grads = iter(torch.ops.speedlight.attention_backward(dout, dlse, out, lse, needs, *args))
    result: list[Any] = [None] * _NUM_ARGUMENTS
    result[12], result[13] = [None] * split_sizes[0], [None] * split_sizes[1]
    for n, need in zip(_DIFFERENTIABLE, needs, strict=True):
        if need:
            result[n] = next(grads)
    return tuple(result)


def _op_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(_NO_SECOND_ORDER.format(what="second derivative (double backward)"))


_forward_op.register_autograd(_op_backward, setup_context=_op_setup_context)
_backward_op.register_autograd(_op_double_backward)


# FLOPs, counted as torch counts its own attention: two products forward, five backward, masked pairs included


def _pairs_times_dims(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    num_heads, dims = q.shape[-2], q.shape[-1] + v.shape[-1]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return q.shape[0] * num_heads * q.shape[1] * k.shape[1] * dims
    if torch._subclasses.fake_tensor.is_fake(cu_seqlens_q):
        return num_heads * q.shape[0] * (k.shape[0] // max(cu_seqlens_q.shape[0] - 1, 1)) * dims
    pairs = (cu_seqlens_q.long().diff() * cu_seqlens_k.long().diff()).sum()
    return num_heads * int(pairs) * dims


@register_flop_formula(torch.ops.speedlight.attention_forward, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, *args: Any, **_: Any) -> int:
    return 2 * _pairs_times_dims(q, k, v, cu_seqlens_q, cu_seqlens_k)


@register_flop_formula(torch.ops.speedlight.attention_backward, get_raw=True)
def _backward_flops(dout: Any, dlse: Any, out: Any, lse: Any, needs: Any, *args: Any, **_: Any) -> int:
    return 5 * _pairs_times_dims(*args[:5])
