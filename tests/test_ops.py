"""The operators and the autograd wrappers: schema and fakes, compile, dispatch modes, functorch, checkpointing.

Eager calls go through an autograd.Function, the others through custom ops, so much is tested on both routes.
"""

from __future__ import annotations

import contextlib
import copy
import shutil

import pytest
import torch
from cases import BY_NAME
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import speedlight
from speedlight import Bias, Mask, ops, reference
from speedlight.testing import CaseInputs, make_inputs

FORWARD, BACKWARD = torch.ops.speedlight.attention_forward.default, torch.ops.speedlight.attention_backward.default


def qkv(batch=2, seqlen_q=6, seqlen_k=9, heads=4, heads_kv=2, dim=8, dtype=torch.float32, grad=False):
    q = torch.randn(batch, seqlen_q, heads, dim, dtype=dtype)
    k, v = (torch.randn(batch, seqlen_k, heads_kv, dim, dtype=dtype) for _ in "kv")
    return [t.requires_grad_(grad) for t in (q, k, v)]


def grads_of(function, leaves, *more):
    """(out, gradients of the leaves) of function(*leaves), for fixed random output gradients."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in leaves]
    outputs = function(*leaves, *more)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(3)
    seeds = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outputs]
    torch.autograd.backward(outputs, seeds)
    return outputs, [t.grad for t in leaves]


def assert_same(one, other, **tolerance):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, **tolerance)


@contextlib.contextmanager
def op_route():
    """Makes plain eager calls go through the custom ops, as any dispatch mode does."""
    with FlopCounterMode(display=False) as mode:
        yield mode


ROUTES = pytest.mark.parametrize("route", [contextlib.nullcontext, op_route], ids=["function", "op"])


def call(inputs: CaseInputs, **more):
    return inputs.call(speedlight.attention, speedlight.attention_varlen, return_lse=True, **more)


# Schema and fakes


class _Recorded(Exception):
    pass


def op_arguments(inputs: CaseInputs, monkeypatch) -> tuple:
    """What a call with these inputs passes to the forward op."""
    caught = []

    class Stub:
        def attention_forward(self, *args):
            caught.append(args)
            raise _Recorded

    with monkeypatch.context() as patch, pytest.raises(_Recorded), op_route():
        patch.setattr(torch.ops, "speedlight", Stub())
        call(inputs)
    return caught[0]


CHECKED = (
    "plain", "odd_lengths", "causal_blind_rows", "window_both", "softcap", "alibi_batched", "bias_hqk", "bias_k",
    "mask_b__k", "mask_fn_segments", "bias_fn_aux", "bias_fn_mask_fn", "sink_blind_rows", "dropout_gqa_causal",
    "dim_40_72",
    "seqused_none", "layout_heads_first", "layout_packed", "no_keys", "no_keys_sink", "no_queries", "empty_batch",
    "varlen_cross", "varlen_no_max", "varlen_zero_lengths", "varlen_tail", "varlen_no_sequence", "varlen_bias",
    "combined",
    "combined_functions", "combined_varlen", "combined_varlen_functions", "combined_bf16", "combined_varlen_f64",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is copied")
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_and_fakes(name, monkeypatch):
    """Schema, autograd registration, fake results and AOT dispatch with dynamic shapes; then shapes, strides and dtypes
    of the fakes against the real results once more, for the backward op too."""
    inputs = make_inputs(BY_NAME[name])
    inputs = inputs.replace({n: t.requires_grad_() for n, t in inputs.leaves.items()})
    args = op_arguments(inputs, monkeypatch)
    opcheck(FORWARD, args)

    with torch.no_grad():
        out, lse = FORWARD(*args)
        needs = [n in inputs.leaves for n in ("q", "k", "v", "alibi_slopes", "bias", "sink")]
        for dout, dlse in ((torch.ones_like(out), torch.ones_like(lse)), (torch.ones_like(out), None), (None, None)):
            back = (dout, dlse, out, lse, needs, *args)
            opcheck(BACKWARD, back, test_utils=("test_schema", "test_faketensor"))
            mode = torch._subclasses.FakeTensorMode()
            fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, back))
            with mode:
                fakes = [*FORWARD(*fake[0]), *BACKWARD(*fake[1])]
            for a, b in zip(fakes, [out, lse, *BACKWARD(*back)], strict=True):
                assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_the_op_and_the_function_compute_the_same(monkeypatch):
    for name in ("combined", "combined_varlen", "combined_functions", "bias_hqk", "plain_bf16"):
        inputs = make_inputs(BY_NAME[name])

        def run(*leaves, inputs=inputs):
            return call(inputs.replace(dict(zip(inputs.leaves, leaves, strict=True))))

        eager = grads_of(run, inputs.leaves.values())
        with op_route() as mode:
            through_op = grads_of(run, inputs.leaves.values())
        assert mode.get_total_flops() > 0  # it did go through the op
        assert_same(through_op, eager, rtol=0, atol=0)


@pytest.mark.parametrize("varlen", [False, True])
def test_fake_tensors_of_a_gpu_that_is_not_there(varlen):
    """Without autograd, which asks the driver; the backward op stands for itself."""
    with torch._subclasses.FakeTensorMode():
        q, k, v = (
            torch.empty(3, n, h, d, device="cuda", dtype=torch.bfloat16)
            for n, h, d in ((5, 4, 64), (7, 2, 64), (7, 2, 32))
        )
        cu = (torch.empty(4, device="cuda", dtype=torch.int32),) * 2 if varlen else ()
        tensors = [t.flatten(0, 1) for t in (q, k, v)] if varlen else [q, k, v]
        function = speedlight.attention_varlen if varlen else speedlight.attention
        out, lse = function(*tensors, *cu, causal=True, return_lse=True)
        assert out.shape == ((15, 4, 32) if varlen else (3, 5, 4, 32))
        assert lse.shape == ((4, 15) if varlen else (3, 4, 5))
        assert out.device.type == lse.device.type == "cuda"
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        options = (None, True, None, None, 0.0, 0.0, False, "", "", "")  # from softmax_scale on: causal
        args = (*tensors, *(cu or (None, None)), *[None] * 7, [], [], None, None, *options)
        grads = BACKWARD(out, lse, out, lse, [True, False, True, False, False, False], *args)
        assert [(g.shape, g.dtype, g.device.type) for g in grads] == [
            (t.shape, torch.bfloat16, "cuda") for t in (tensors[0], tensors[2])
        ]  # fmt: skip


# torch.compile

BACKENDS = ["aot_eager"] + (["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["causal", "combined", "combined_functions", "combined_varlen", "plain_bf16"])
@pytest.mark.parametrize("compiler", BACKENDS)
def test_a_full_graph_gives_the_eager_results(compiler, name):
    inputs = make_inputs(BY_NAME[name])
    names = list(inputs.leaves)

    def run(*leaves):
        q, *rest = leaves
        out, lse = call(inputs.replace(dict(zip(names, (q * 2, *rest), strict=True))))
        return out * 3, lse

    compiled = torch.compile(run, backend=compiler, fullgraph=True)
    leaves = inputs.leaves.values()
    assert_same(grads_of(compiled, leaves), grads_of(run, leaves), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert_close(compiled(*leaves), run(*leaves), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("varlen", [False, True])
def test_new_lengths_do_not_compile_anew(varlen):
    """One compilation for the first length, one for all others."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def run(q, k, v, *cu):
        function = speedlight.attention_varlen if varlen else speedlight.attention
        return function(q, k, v, *cu, causal=True, window=(20, 0))

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for length in (17, 64, 300):
        tensors, cu = qkv(1, length, length), ()
        if varlen:
            tensors = [t[0] for t in tensors]
            cu = (torch.tensor([0, 5, length], dtype=torch.int32),) * 2
        assert_same(grads_of(compiled, tensors, *cu), grads_of(run, tensors, *cu))
    assert counter.frame_count <= 2


def test_max_seqlen_may_be_a_tensor_under_compile():
    tensors = [t[0] for t in qkv(1, 11, 11)]
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)

    def run(q, k, v, longest):
        return speedlight.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for longest in (torch.tensor(7), torch.tensor([7]), 7, None):
        assert_same(grads_of(lambda *t, n=longest: compiled(*t, n), tensors), grads_of(lambda *t: run(*t, 7), tensors))


def see_own_segment(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, segment_q, segment_kv):
    return segment_q == segment_kv


def slope_per_head(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, slope):
    return slope * (kv_idx - q_idx)


def test_functions_cross_the_schema_with_their_aux():
    tensors = qkv()
    aux = [torch.randint(3, (6,)), torch.randint(3, (9,)), torch.rand(4)]

    def run(q, k, v, a, b, c):
        mask, bias = Mask(see_own_segment, [("q", a), ("kv", b)]), Bias(slope_per_head, [("head", c)])
        return speedlight.attention(q, k, v, mask=mask, bias=bias)

    def by_tables(q, k, v, a, b, c):
        i, j = torch.arange(6)[:, None], torch.arange(9)
        return speedlight.attention(q, k, v, mask=a[:, None] == b, bias=c[:, None, None] * (j - i))

    expected = grads_of(by_tables, tensors, *aux)
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        assert_same(grads_of(function, tensors, *aux), expected)
    with op_route():
        assert_same(grads_of(run, tensors, *aux), expected)


def test_dropout_under_compile_is_that_of_its_seed():
    tensors = qkv()

    def run(q, k, v, seed):
        return speedlight.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for seed in (torch.tensor([1]), torch.tensor([2])):
        results.append(grads_of(compiled, tensors, seed))
        assert_same(results[-1], grads_of(run, tensors, seed))
    assert not torch.equal(results[0][0][0], results[1][0][0])


def test_a_seed_drawn_under_compile_is_used_in_both_passes():
    """The mask read from the forward is that of the gradient of v."""
    q, k = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
    v = torch.eye(8)[None, :, None].requires_grad_()

    def run(v):
        return speedlight.attention(q, k, v, dropout_p=0.5)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    outs = [compiled(v) for _ in range(2)]
    assert not torch.equal(*outs)
    for out in outs:
        (dv,) = torch.autograd.grad(out, v, torch.eye(8)[None, :, None])
        assert_close(dv[0, :, 0], out[0, :, 0].T)


def test_a_generator_under_compile_names_the_way_round():
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(1)
    compiled = torch.compile(
        lambda q: speedlight.attention(q, k, v, dropout_p=0.5, generator=generator), backend="aot_eager", fullgraph=True
    )  # fmt: skip
    with pytest.raises(Exception, match="dropout_seed"):
        compiled(q)


@pytest.mark.parametrize("options", [dict(window=(-3, None)), dict(softcap=-1.0), dict(mask=torch.ones(6, 9))])
def test_mistakes_are_named_under_compile_too(options):
    q, k, v = qkv()
    compiled = torch.compile(lambda q: speedlight.attention(q, k, v, **options), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=next(iter(options))):
        compiled(q)


@pytest.mark.parametrize("window", [3, (1, 2, 3), (True, None)])
def test_a_malformed_window_is_named_on_the_op_route(window):
    with op_route(), pytest.raises((TypeError, ValueError), match="window"):
        speedlight.attention(*qkv(), window=window)


# Autograd


def test_without_gradients_nothing_is_saved():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert not speedlight.attention(*qkv(grad=True)).requires_grad
        assert not speedlight.attention(*qkv()).requires_grad
        assert packed == []
        assert speedlight.attention(*qkv(grad=True)).requires_grad
    assert packed


@ROUTES
def test_what_is_saved_for_the_backward_is_inputs_out_and_lse(route):
    tensors = qkv(1, 200, 300, grad=True)
    packed = []
    with route(), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out, lse = speedlight.attention(*tensors, causal=True, return_lse=True)
    assert sorted(t.numel() for t in packed) == sorted(t.numel() for t in (*tensors, out, lse))


@ROUTES
def test_only_requested_gradients_are_computed(route, monkeypatch):
    asked = []
    backward = ops.run_backward
    monkeypatch.setattr(ops, "run_backward", lambda *args: asked.append(args[-1]) or backward(*args))
    q, k, v = qkv()
    options = dict(bias=torch.randn(4, 6, 9), sink=torch.randn(4), alibi_slopes=torch.rand(4))
    for wanted in ({"q"}, {"k"}, {"v"}, {"bias"}, {"sink"}, {"alibi_slopes"}, {"k", "sink"}, {"q", "k", "v", "bias"}):
        leaves = {**dict(q=q, k=k, v=v), **options}
        leaves = {n: t.detach().clone().requires_grad_(n in wanted) for n, t in leaves.items()}
        with route():
            speedlight.attention(**leaves).sum().backward()
        assert {n for n, need in asked[-1]._asdict().items() if need} == wanted
        assert {n for n, t in leaves.items() if t.grad is not None} == wanted


@ROUTES
@pytest.mark.parametrize("name", ["combined", "combined_functions", "combined_varlen", "layout_packed"])
def test_inputs_keep_their_values_and_results_share_no_memory(route, name):
    inputs = make_inputs(BY_NAME[name])
    tensors = [*inputs[:3], *(t for t in inputs.options.values() if isinstance(t, torch.Tensor))]
    before = copy.deepcopy(tensors)
    with route():
        outputs, grads = grads_of(
            lambda *leaves: call(inputs.replace(dict(zip(inputs.leaves, leaves, strict=True)))), inputs.leaves.values()
        )
    for t, saved in zip(tensors, before, strict=True):
        assert_close(t, saved, rtol=0, atol=0, equal_nan=True)
    addresses = [t.untyped_storage().data_ptr() for t in (*tensors, *outputs, *grads)]
    distinct = {t.untyped_storage().data_ptr() for t in tensors}
    assert len(set(addresses)) == len(distinct) + len(outputs) + len(grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@ROUTES
def test_autocast_computes_in_half_precision_and_returns_float32_gradients(route, dtype):
    tensors = qkv()
    bias, slopes = torch.randn(4, 6, 9), torch.rand(4)
    seen = []

    def run(*leaves):
        *rest, bias, slopes = leaves
        out = speedlight.attention(*rest, bias=bias, alibi_slopes=slopes)
        seen.append(out.dtype)
        return out.float()

    with route(), torch.autocast("cpu", dtype=dtype):
        (out,), grads = grads_of(run, (*tensors, bias, slopes))
    assert seen == [dtype]
    assert all(g.dtype is torch.float32 for g in grads)
    half = [t.to(dtype).double() for t in tensors]
    (exact,), exact_grads = grads_of(reference_with_bias, (*half, bias.double(), slopes.double()))
    assert_close(out.double(), exact, rtol=0.05, atol=0.05)
    for g, e in zip(grads, exact_grads, strict=True):
        assert_close(g.double(), e, rtol=0.1, atol=0.1)
    with route(), torch.autocast("cpu", enabled=False):
        assert speedlight.attention(*tensors).dtype is torch.float32
    with route(), torch.autocast("cpu", dtype=dtype):
        assert speedlight.attention(*(t.double() for t in tensors)).dtype is torch.float64


def reference_with_bias(q, k, v, bias, slopes):
    return reference.attention(q, k, v, bias=bias, alibi_slopes=slopes)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant, compiled):
    """Dropout too, with a seed that the recomputation sees again."""
    seed = torch.tensor([77])

    def layer(q, k, v):
        return speedlight.attention(q * 1.5, k, v, causal=True, dropout_p=0.3, dropout_seed=seed) + q

    inner = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    tensors = qkv()

    def checkpointed(*leaves):
        return checkpoint(inner, *leaves, use_reentrant=use_reentrant)

    assert_same(grads_of(checkpointed, tensors), grads_of(layer, tensors))


def test_selective_checkpointing_sees_the_op():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    runs = []
    forward = ops.run_forward

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v):
        return speedlight.attention(q * 1.5, k, v).sin()

    def checkpointed(*leaves):
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(layer, *leaves, use_reentrant=False, context_fn=contexts)

    tensors = qkv()
    expected = grads_of(layer, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "run_forward", lambda *args: runs.append(1) or forward(*args))
        assert_same(grads_of(checkpointed, tensors), expected)
    assert len(runs) == 1  # kept, not computed again


WAY_ROUND = r"speedlight\.reference\.attention"


@ROUTES
@pytest.mark.parametrize("wanted", ["q", "v"])
def test_a_second_derivative_names_the_way_round(route, wanted):
    tensors = qkv(grad=True)
    leaf = tensors["qkv".index(wanted)]
    with route():
        (grad,) = torch.autograd.grad(speedlight.attention(*tensors).sin().sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match=WAY_ROUND):
            grad.pow(2).sum().backward()


@ROUTES
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_names_the_way_round(route, grad):
    q, k, v = qkv(grad=grad)
    tangent = torch.randn_like(q)
    with route(), pytest.raises(NotImplementedError, match=WAY_ROUND):
        torch.func.jvp(lambda x: speedlight.attention(x, k, v), (q.detach(),), (tangent,))
    forward_ad = torch.autograd.forward_ad
    with route(), forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=WAY_ROUND):
            speedlight.attention(forward_ad.make_dual(q, tangent), k, v)
        with pytest.raises(NotImplementedError, match=WAY_ROUND):
            dual = forward_ad.make_dual(torch.zeros(4), torch.ones(4))
            speedlight.attention(q.detach(), k.detach(), v.detach(), sink=dual)
        assert speedlight.attention(q, k, v).shape == q.shape  # no tangent comes in


def test_forward_mode_under_compile_names_the_way_round():
    q, k, v = qkv()
    compiled = torch.compile(
        lambda x: torch.func.jvp(lambda x: speedlight.attention(x, k, v), (x,), (x,))[1], backend="aot_eager"
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=WAY_ROUND):
        compiled(q)


def test_forward_over_reverse_names_the_way_round():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=WAY_ROUND):
        torch.func.hessian(lambda x: speedlight.attention(x, k, v).sin().sum())(q)


# functorch


@ROUTES
def test_vmap_over_any_argument_and_axis(route):
    q, k, v = (t.unsqueeze(0).repeat(3, 1, 1, 1, 1) + torch.arange(3.0).view(3, 1, 1, 1, 1) / 4 for t in qkv())
    bias, sink = torch.randn(3, 6, 9), torch.randn(3, 4)

    def f(q, k, v, bias, sink):
        return speedlight.attention(q, k, v, bias=bias, sink=sink, causal=True, return_lse=True)

    with route():
        mapped = torch.vmap(f)(q, k, v, bias, sink)
        only_bias = torch.vmap(f, in_dims=(None, None, None, 0, None))(q[0], k[0], v[0], bias, sink[0])
        inner = torch.vmap(f, in_dims=(2, None, 1, None, None), out_dims=(1, 2))(
            q.movedim(0, 2), k[0], v.movedim(0, 1), bias[0], sink[0]
        )
    for n in range(3):
        assert_close([t[n] for t in mapped], [*f(q[n], k[n], v[n], bias[n], sink[n])])
        assert_close([t[n] for t in only_bias], [*f(q[0], k[0], v[0], bias[n], sink[0])])
        assert_close([inner[0][:, n], inner[1][:, :, n]], [*f(q[n], k[0], v[n], bias[0], sink[0])])


@ROUTES
def test_gradients_per_sample_and_of_a_mapped_function(route):
    q, k, v = qkv(batch=5)
    weight = torch.randn(2, 4, 8)

    def loss(w, q, k, v):
        return speedlight.attention(torch.einsum("bshd,hd->bshd", q, w), k, v, causal=True).sin().sum()

    def exact(w, q, k, v):
        return reference.attention(torch.einsum("bshd,hd->bshd", q, w), k, v, causal=True).sin().sum()

    samples = [t.unsqueeze(1) for t in (q, k, v)]
    per_sample = torch.stack([
        torch.autograd.grad(exact(w, *(t[n] for t in samples)), w)[0]
        for w in [weight[0].double().requires_grad_()] for n in range(5)
    ])  # fmt: skip
    with route():
        vmap_of_grad = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(weight[0], *samples)
        grad_of_vmap = torch.func.grad(
            lambda w: torch.vmap(loss, in_dims=(None, 0, 0, 0))(w, *samples).sum()
        )(weight[0])  # fmt: skip
        jacobian = torch.func.jacrev(lambda x: speedlight.attention(x, k[:1, :2], v[:1, :2]))(q[:1, :2, :, :])
    assert_close(vmap_of_grad.double(), per_sample, rtol=1e-4, atol=1e-5)
    assert_close(grad_of_vmap.double(), per_sample.sum(0), rtol=1e-4, atol=1e-5)
    x = q[:1, :2].double()
    expected = torch.func.jacrev(lambda x: reference.attention(x, k[:1, :2], v[:1, :2]))(x)
    assert_close(jacobian.double(), expected, rtol=1e-4, atol=1e-5)


# Subclasses and modes


class Logged(torch.Tensor):
    """A wrapper that notes the operators it meets."""

    met: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Logged.met.append(func)
        unwrapped = torch.utils._pytree.tree_map_only(Logged, lambda t: t.inner, (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        return torch.utils._pytree.tree_map_only(torch.Tensor, Logged, result)


def test_a_tensor_subclass_meets_the_op_and_nothing_inside_it():
    q, k, v = qkv()
    Logged.met.clear()
    leaf = Logged(q).requires_grad_()
    out = speedlight.attention(leaf, Logged(k), Logged(v), causal=True)
    assert isinstance(out, Logged)
    assert_close(out.inner, speedlight.attention(q, k, v, causal=True))
    assert {op for op in Logged.met if op is not torch.ops.aten.detach.default} == {FORWARD}
    out.backward(Logged(torch.ones_like(q)))
    assert {op for op in Logged.met if op is not torch.ops.aten.detach.default} == {FORWARD, BACKWARD}
    plain = q.clone().requires_grad_()
    speedlight.attention(plain, k, v, causal=True).backward(torch.ones_like(q))
    assert_close(leaf.grad.inner, plain.grad)


def test_parameters_and_plain_subclasses():
    q, k, v = qkv()
    expected = speedlight.attention(q, k, v)
    assert torch.equal(speedlight.attention(torch.nn.Parameter(q), k, v), expected)

    class Named(torch.Tensor):
        pass

    out = speedlight.attention(q.as_subclass(Named), k, v)
    assert torch.equal(out.as_subclass(torch.Tensor), expected)


def test_flops_are_counted_as_torch_counts_its_own():
    """Two products forward, five backward, the pairs that a mask hides included."""
    (q, k, v), pairs = qkv(grad=True), 2 * 4 * 6 * 9
    with FlopCounterMode(display=False) as mode:
        out = speedlight.attention(q, k, v, causal=True)
        assert mode.get_total_flops() == 2 * pairs * (8 + 8)
        out.sum().backward()
    assert mode.get_total_flops() == 7 * pairs * (8 + 8)
    with FlopCounterMode(display=False) as theirs, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        x = [t.detach().transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in (q, k, v)]
        torch.nn.functional.scaled_dot_product_attention(*x)
    assert theirs.get_total_flops() == 2 * pairs * (8 + 8)


def test_flops_of_packed_sequences_are_those_of_each():
    q, k, v = (t[0] for t in qkv(1, 9, 9))
    cu_q, cu_k = torch.tensor([0, 2, 9]), torch.tensor([0, 5, 9])
    with FlopCounterMode(display=False) as mode:
        speedlight.attention_varlen(q, k, v, cu_q, cu_k)
    assert mode.get_total_flops() == 2 * 4 * (2 * 5 + 7 * 4) * (8 + 8)
