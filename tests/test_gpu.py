"""What only a GPU can show: sizes beyond 32 bits, huge grids, repeat runs, graphs, streams, memory, compile counts."""

from __future__ import annotations

import warnings

import pytest
import torch

import speedlight
from speedlight import reference, select
from speedlight.testing import assert_close

pytestmark = pytest.mark.gpu

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# What holds of `fa2` has to hold of `fa3` too.
both = pytest.mark.parametrize(
    "backend", ["fa2", pytest.param("fa3", marks=pytest.mark.skipif(not _HOPPER, reason="needs Hopper"))]
)


def _qkv(*shapes, dtype=torch.bfloat16, grad=False):
    return tuple(torch.randn(s, device="cuda", dtype=dtype).requires_grad_(grad) for s in shapes)


def _close(out, ref, dtype):
    """Within a few roundings of ``dtype`` of the float64 reference, everywhere."""
    assert out.shape == ref.shape
    assert not out.isnan().any()
    error = (out.double() - ref).abs().max().item()
    assert error <= 8 * torch.finfo(dtype).eps * max(ref.abs().max().item(), 1e-3), error


def _grads(out, inputs, dout):
    return torch.autograd.grad(out, inputs, dout)


def _same(results, expected, backend):
    """Bit for bit; but the last three are dq, dk and dv, and `fa3` adds dq up in any order unless told not to."""
    for n, (a, b) in enumerate(zip(results, expected, strict=True)):
        if backend == "fa3" and n == len(results) - 3:
            _close(a, b.double(), a.dtype)
        else:
            assert torch.equal(a, b), n


@pytest.mark.parametrize("shape", [(70_000, 4, 1, 16), (1, 4, 70_000, 16), (70_000, 4, 2, 16)])
@both
def test_more_than_65535_batches_or_heads(shape, backend):
    q, k, v = _qkv(shape, shape, shape, dtype=torch.float16, grad=True)
    dout = torch.randn_like(q)
    out = speedlight.attention(q, k, v, backend=backend)
    grads = _grads(out, (q, k, v), dout)
    b, h = (-3, 0) if shape[0] > 1 else (0, -3)
    last = [t[b:, :, h:].detach().double().requires_grad_() for t in (q, k, v)]
    ref = reference.attention(*last)
    _close(out[b:, :, h:], ref, q.dtype)
    for grad, expected in zip(grads, _grads(ref, last, dout[b:, :, h:].double()), strict=True):
        _close(grad[b:, :, h:], expected, q.dtype)


@both
def test_80000_short_sequences(backend):
    count, length = 80_000, 16
    q, k, v = _qkv(*[(count * length, 2, 32)] * 3, grad=True)
    cu = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    dout = torch.randn_like(q)
    out = speedlight.attention_varlen(q, k, v, cu, cu, causal=True, backend=backend)
    grads = _grads(out, (q, k, v), dout)
    for part in (slice(0, length), slice(-length, None)):
        sequence = [t[part][None].detach().double().requires_grad_() for t in (q, k, v)]
        ref = reference.attention(*sequence, causal=True)
        _close(out[part][None], ref, q.dtype)
        for grad, expected in zip(grads, _grads(ref, sequence, dout[part][None].double()), strict=True):
            _close(grad[part][None], expected, q.dtype)


@both
def test_more_than_2_31_elements(backend):
    """The last rows of tensors of 2^31 + 2^29 elements, in the batch and in the row direction."""
    heads, dim = 16, 128
    for shape in ((10, 2**17, heads, dim), (1, 10 * 2**17, heads, dim)):
        rows = shape[1]
        q = torch.randn((shape[0], 256, heads, dim), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        v = k.detach().clone().requires_grad_()
        assert k.numel() > 2**31
        dout = torch.randn_like(q)
        out, lse = speedlight.attention(q, k, v, window=(300, 0), return_lse=True, backend=backend)
        dq, dk, dv = _grads(out, (q, k, v), dout)
        last = [t[-1:, -600:, -1:].detach().double().requires_grad_() for t in (q, k, v)]
        ref, ref_lse = reference.attention(*last, window=(300, 0), return_lse=True)
        _close(out[-1:, :, -1:], ref, q.dtype)
        assert (lse[-1:, -1:].double() - ref_lse).abs().max() < 1e-4
        for grad, expected in zip((dq, dk, dv), _grads(ref, last, dout[-1:, :, -1:].double()), strict=True):
            _close(grad[-1:, -600:, -1:], expected, q.dtype)
        assert not dk[:, : rows - 600].any()  # nobody sees these
        del q, k, v, out, lse, dq, dk, dv


@both
def test_row_stride_so_long_that_a_tile_spans_2_31_elements(backend):
    storage = torch.empty(2**31 + 2**27, device="cuda", dtype=torch.float16)
    rows, stride, dim = 128, 2**24 + 2**10, 64
    k = torch.as_strided(storage, (1, rows, 1, dim), (0, stride, 0, 1))
    k.copy_(torch.randn(1, rows, 1, dim))
    (q,) = _qkv((1, 64, 1, dim), dtype=torch.float16)
    dout = torch.randn_like(q)
    wide = [q.requires_grad_(), k.detach().requires_grad_(), k.detach().requires_grad_()]
    packed = [t.detach().double().requires_grad_() for t in (q, k.contiguous(), k.contiguous())]
    out, ref = speedlight.attention(*wide, backend=backend), reference.attention(*packed)
    _close(out, ref, q.dtype)
    for grad, expected in zip(_grads(out, wide, dout), _grads(ref, packed, dout.double()), strict=True):
        _close(grad, expected, q.dtype)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
@both
def test_30_runs_are_bitwise_equal(varlen, deterministic, backend):
    """With another kernel running on a second stream."""
    q, k, v = _qkv((4, 1000, 8, 128), (4, 1000, 2, 128), (4, 1000, 2, 128), grad=True)
    dout = torch.randn_like(q)
    cu = torch.tensor([0, 300, 300, 1900, 4000], device="cuda", dtype=torch.int32)
    noise, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    options = dict(causal=True, return_lse=True, deterministic=deterministic, backend=backend)

    def run():
        if varlen:
            flat = [t.flatten(0, 1) for t in (q, k, v)]
            out, lse = speedlight.attention_varlen(*flat, cu, cu, **options)
            return out, lse, *_grads(out, (q, k, v), dout.flatten(0, 1))
        out, lse = speedlight.attention(q, k, v, **options)
        return out, lse, *_grads(out, (q, k, v), dout)

    first = run()
    for _ in range(29):
        with torch.cuda.stream(side):
            torch.mm(noise, noise)
        _same(run(), first, None if deterministic else backend)


def test_fp32_is_not_tf32():
    q, k, v = _qkv(*[(1, 128, 1, 32)] * 3, dtype=torch.float32, grad=True)
    dout = torch.randn_like(q)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    ref = reference.attention(*exact, causal=True)
    expected = _grads(ref, exact, dout.double())
    errors = {}
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            out = speedlight.attention(q, k, v, causal=True, backend="fa2")
            grads = _grads(out, (q, k, v), dout)
            pairs = zip((out, *grads), (ref, *expected), strict=True)
            errors[tf32] = max((a.double() - b).abs().max().item() for a, b in pairs)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[False] < 2e-5, errors
    assert 1e-4 < errors[True] < 2e-2, errors  # and the switch does something


@both
def test_cuda_graph_replays_on_new_values(backend):
    q, k, v = _qkv(*[(2, 200, 2, 64)] * 3, grad=True)
    dout = torch.randn_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            _grads(speedlight.attention(q, k, v, causal=True, backend=backend), (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = speedlight.attention(q, k, v, causal=True, backend=backend)
        grads = _grads(out, (q, k, v), dout)
    for _ in range(3):
        with torch.no_grad():
            for t in (q, k, v, dout):
                t.normal_()
            for t in (out, *grads):
                t.fill_(float("nan"))
        graph.replay()
        fresh = speedlight.attention(q, k, v, causal=True, backend=backend)
        _same((out, *grads), (fresh, *_grads(fresh, (q, k, v), dout)), backend)


def test_cpu_backend_refuses_varlen_in_a_graph():
    q, k, v = _qkv(*[(20, 2, 16)] * 3)
    cu = torch.tensor([0, 5, 20], device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        speedlight.attention_varlen(q, k, v, cu, cu, backend="cpu")
    torch.cuda.synchronize()


@both
def test_no_synchronisation(backend):
    q, k, v = _qkv(*[(40, 2, 16)] * 3, grad=True)
    cu = torch.tensor([0, 5, 20], device="cuda", dtype=torch.int32)
    dout = torch.randn_like(q)
    _grads(speedlight.attention_varlen(q, k, v, cu, cu, backend=backend), (q, k, v), dout)
    longest = torch.tensor(15, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = speedlight.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True, backend=backend)
        _grads(out, (q, k, v), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not out.isnan().any()


@both
def test_max_seqlen_too_small_does_not_truncate(backend):
    q, k, v = _qkv(*[(600, 2, 64)] * 3)
    cu = torch.tensor([0, 500, 600], device="cuda", dtype=torch.int32)
    assert torch.equal(
        speedlight.attention_varlen(q, k, v, cu, cu, 7, 7, backend=backend),
        speedlight.attention_varlen(q, k, v, cu, cu, backend=backend),
    )


def test_at_most_four_kernels_for_a_hundred_lengths():
    from speedlight.backends import fa2

    kernels = [fa2._attn_fwd_kernel, fa2._attn_bwd_delta_kernel, fa2._attn_bwd_dkdv_kernel, fa2._attn_bwd_dq_kernel]
    device = torch.cuda.current_device()

    def compiled():
        return [len(kernel.device_caches[device][0]) for kernel in kernels]

    before = compiled()
    for seqlen in [1, 16, 17, *range(32, 97 * 16, 16)]:
        q, k, v = _qkv(*[(1, seqlen, 3, 48)] * 3, grad=True)
        _grads(speedlight.attention(q, k, v, causal=True, backend="fa2"), (q, k, v), torch.randn_like(q))
    assert all(after - first <= 4 for after, first in zip(compiled(), before, strict=True)), (before, compiled())


@both
def test_prepared_launches_equal_plain_ones(backend):
    """The repeated launch, which bypasses Triton's own, must not mix up arguments, also for other alignments."""
    from speedlight import launch

    base = torch.randn(3, 2, 100, 2, 80, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 1, 8):
        q, k, v = (base[n][..., offset : offset + 64] for n in range(3))
        launch._PLANS.clear()
        first = speedlight.attention(q, k, v, causal=True, backend=backend)
        again = speedlight.attention(q.clone(), k, v.clone(), causal=True, backend=backend)
        assert torch.equal(first, speedlight.attention(q, k, v, causal=True, backend=backend))
        assert torch.equal(first, again) or offset  # the clones are aligned: other tile, other rounding
        _close(again, reference.attention(q, k, v, causal=True), q.dtype)


def test_frozen_keys_and_values_skip_their_kernel():
    q, k, v = _qkv(*[(1, 128, 2, 64)] * 3)
    q.requires_grad_()
    out = speedlight.attention(q, k, v, backend="fa2")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out.backward(torch.randn_like(out))
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "_attn_bwd_dq_kernel" in names
    assert "_attn_bwd_dkdv_kernel" not in names


def test_memory_does_not_depend_on_the_longest_sequence():
    tokens, peaks = 65_536, []
    for lengths in ([32_768] + [1] * 32_768, [4096] * 16):
        q, k, v = _qkv(*[(tokens, 4, 64)] * 3, grad=True)
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        dout = torch.randn_like(q)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        _grads(speedlight.attention_varlen(q, k, v, cu, cu, causal=True, backend="fa2"), (q, k, v), dout)
        peaks.append(torch.cuda.max_memory_allocated() - start)
        del q, k, v, dout
    assert abs(peaks[0] - peaks[1]) < 0.05 * peaks[1], peaks


@both
def test_inference_keeps_only_the_output(backend):
    q, k, v = _qkv(*[(1, 4096, 4, 64)] * 3)
    with torch.inference_mode():
        speedlight.attention(q, k, v, backend=backend)
        before = torch.cuda.memory_allocated()
        out = speedlight.attention(q, k, v, backend=backend)
        assert torch.cuda.memory_allocated() - before == out.numel() * out.element_size()


def test_refused_options_run_through_cpu_maths_with_one_warning():
    q, k, v = _qkv(*[(1, 64, 2, 264)] * 3, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        select._warned.clear()
        select._CHOICES.clear()
        outs = [speedlight.attention(q, k, v) for _ in range(2)]
        outs.append(speedlight.attention(q, k, v, causal=True))
    assert sum("cpu" in str(w.message) for w in caught) == 1
    assert_close(outs[0], reference.attention(q, k, v))


@both
def test_two_streams_at_once(backend):
    """200 launches on each of two streams, outputs poisoned before: bitwise those of one stream."""
    inputs = [_qkv(*[(2, 777, 4, 64)] * 3) for _ in range(2)]
    expected = [speedlight.attention(*x, causal=True, backend=backend) for x in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(200):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(speedlight.attention(*inputs[n], causal=True, backend=backend))
    torch.cuda.synchronize()
    for n in range(2):
        assert all(torch.equal(out, expected[n]) for out in results[n])


@both
def test_gradients_on_two_streams_and_in_two_graphs_at_once(backend):
    inputs = [_qkv(*[(2, 777, 4, 64)] * 3, grad=True) for _ in range(2)]
    douts = [torch.randn_like(x[0]) for x in inputs]

    def run(n):
        return _grads(speedlight.attention(*inputs[n], causal=True, backend=backend), inputs[n], douts[n])

    expected = [run(n) for n in range(2)]
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for n in range(2):
        with torch.cuda.graph(graphs[n]):
            results.append(run(n))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                _same(run(n), expected[n], backend)
                for t in results[n]:
                    t.fill_(float("nan"))
                graphs[n].replay()
        torch.cuda.synchronize()
        for n in range(2):
            _same(results[n], expected[n], backend)


@both
def test_compiled_with_cuda_graphs(backend):
    """torch.compile's warm-up sends all allocations to a pool that replays use again: nothing of it may be kept."""
    inputs = [_qkv(*[(2, 300, 4, 64)] * 3) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: speedlight.attention(q, k, v, causal=True, backend=backend) * 2,
                             mode="reduce-overhead")  # fmt: skip
    with torch.no_grad():
        for _ in range(3):
            for x in inputs:
                assert torch.equal(compiled(*x), speedlight.attention(*x, causal=True, backend=backend) * 2)


@both
def test_lengths_of_any_stride(backend):
    q, k, v = _qkv(*[(3, 200, 2, 64)] * 3)
    used = torch.tensor([90], device="cuda", dtype=torch.int32).expand(3)
    out = speedlight.attention(q, k, v, seqused_k=used, backend=backend)
    _close(out, reference.attention(q, k[:, :90], v[:, :90]), q.dtype)


@both
def test_two_graphs_at_once(backend):
    """Two graphs of the same call, replayed on two streams at once, 200 times each, outputs poisoned before."""
    inputs = [_qkv(*[(2, 777, 4, 64)] * 3) for _ in range(2)]
    expected = [speedlight.attention(*x, causal=True, backend=backend) for x in inputs]
    graphs, outs = [], []
    for x in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(speedlight.attention(*x, causal=True, backend=backend))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(200):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[n].fill_(float("nan"))
                graphs[n].replay()
                wrong[n] += (outs[n] != expected[n]).sum()
    torch.cuda.synchronize()
    assert [int(w) for w in wrong] == [0, 0]


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fa3_never_reads_or_writes_a_neighbour(head_dim):
    """Sequences that end inside a tile, beside sequences full of NaN; and every row of out and lse is written."""
    lengths = [(200, 333), (70, 70), (1, 500), (0, 40), (300, 0), (129, 127)]
    cu_q, cu_k = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in zip(*lengths, strict=True))
    q, k, v = _qkv(*[(int(cu[-1]), 2, head_dim) for cu in (cu_q, cu_k, cu_k)])
    for n, (rows, keys) in enumerate(lengths):
        poisoned = [t.clone() for t in (q, k, v)]
        for m in range(len(lengths)):
            if m != n:
                for t, cu in zip(poisoned, (cu_q, cu_k, cu_k), strict=True):
                    t[cu[m] : cu[m + 1]] = float("nan")
        for options in (dict(causal=True), dict(window=(40, 10)), {}):
            out, lse = speedlight.attention_varlen(*poisoned, cu_q, cu_k, return_lse=True, backend="fa3", **options)
            at_q, at_k = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
            ref, ref_lse = reference.attention(q[at_q][None], k[at_k][None], v[at_k][None], return_lse=True, **options)
            if rows:
                _close(out[at_q][None], ref, q.dtype)
                seen = ref_lse.isfinite()
                assert torch.equal(lse[:, at_q][None].isfinite(), seen), (rows, keys, options)
                assert (lse[:, at_q][None].double() - ref_lse)[seen].abs().max() < 1e-4 if seen.any() else True


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fa3_gradients_never_read_or_write_a_neighbour(head_dim):
    lengths = [(200, 333), (70, 70), (1, 500), (0, 40), (300, 0), (129, 127)]
    cu_q, cu_k = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in zip(*lengths, strict=True))
    q, k, v, dout = _qkv(*[(int(cu[-1]), 2, head_dim) for cu in (cu_q, cu_k, cu_k, cu_q)])
    for n in range(len(lengths)):
        at_q, at_k = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        poisoned = [torch.full_like(t, float("nan")) for t in (q, k, v, dout)]
        for spoilt, t, at in zip(poisoned, (q, k, v, dout), (at_q, at_k, at_k, at_q), strict=True):
            spoilt[at] = t[at]
        *inputs, spoilt_dout = poisoned
        alone = [t[at][None].double().requires_grad_() for t, at in zip((q, k, v), (at_q, at_k, at_k), strict=True)]
        for options in (dict(causal=True), dict(window=(40, 10)), {}):
            inputs = [t.detach().requires_grad_() for t in inputs]
            out = speedlight.attention_varlen(*inputs, cu_q, cu_k, backend="fa3", **options)
            grads = _grads(out, inputs, spoilt_dout)
            expected = _grads(reference.attention(*alone, **options), alone, dout[at_q][None].double())
            for grad, ref, at in zip(grads, expected, (at_q, at_k, at_k), strict=True):
                if ref.numel():
                    _close(grad[at][None], ref, q.dtype)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("dims", [(16, 128), (32, 128), (128, 16), (64, 128), (72, 40), (8, 8)], ids=str)
def test_fa3_gradients_of_head_dims_and_subsets(dims):
    """Also only those that are asked for."""
    head_dim, head_dim_v = dims
    q, k, v = _qkv((2, 300, 6, head_dim), (2, 391, 2, head_dim), (2, 391, 2, head_dim_v))
    dout = torch.randn(2, 300, 6, head_dim_v, device="cuda", dtype=q.dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected = _grads(reference.attention(*exact, causal=True, softcap=8.0), exact, dout.double())
    for wanted in ((0, 1, 2), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        inputs = [t.detach().requires_grad_(n in wanted) for n, t in enumerate((q, k, v))]
        out = speedlight.attention(*inputs, causal=True, softcap=8.0, backend="fa3")
        for n, grad in zip(wanted, _grads(out, [inputs[n] for n in wanted], dout), strict=True):
            _close(grad, expected[n], q.dtype)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(50, 20)), {}], ids=str)
def test_fa3_passes_from_tile_to_tile(head_dim, options):
    """Many tiles for each program, long and short, without keys and without rows, in any order: what a program carries
    from one to the next must not show."""
    generator = torch.Generator().manual_seed(head_dim)
    lengths = torch.randint(0, 400, (2, 250), generator=generator)
    lengths[0, ::7] = 0
    lengths[1, ::5] = 0
    cu_q, cu_k = (torch.cat([torch.zeros(1), n.cumsum(0)]).int().cuda() for n in lengths)
    q, k, v = _qkv(*[(int(cu[-1]) + 100, 4, head_dim) for cu in (cu_q, cu_k, cu_k)], grad=True)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = speedlight.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, backend="fa3", **options)
    ref, ref_lse = reference.attention_varlen(*exact, cu_q, cu_k, return_lse=True, **options)
    _close(out, ref, q.dtype)
    dout = torch.randn_like(out)
    for grad, expected in zip(_grads(out, (q, k, v), dout), _grads(ref, exact, dout.double()), strict=True):
        _close(grad, expected, q.dtype)
    seen = ref_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse.double() - ref_lse)[seen].abs().max() < 1e-4
    q, k, v = _qkv(*[(16, 400, 8, head_dim)] * 3)
    _close(speedlight.attention(q, k, v, backend="fa3", **options), reference.attention(q, k, v, **options), q.dtype)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(300, 0)), dict(window=(150, 200)), {}], ids=str)
def test_fa3_does_tiles_again_whose_first_columns_mislead(head_dim, dtype, options):
    """Keys whose scores are larger than those of the first block by more than 2^100, or only by 2^20: for single rows,
    for all, in every tile of a program or in its last. The other sequences keep their bits, and every launch gives the
    same."""
    q, k, v = _qkv(*[(40, 700, 4, head_dim)] * 3, dtype=dtype)
    calm = speedlight.attention(q, k, v, backend="fa3", **options)
    k[1, 3] *= 60
    k[2, 690:] *= 60
    k[3:9, 100:300, 1] *= 30
    k[12, ::50] *= 3
    k[39, 400] *= 60
    q[20, 333] *= 60
    spiked = [1, 2, 3, 4, 5, 6, 7, 8, 12, 20, 39]
    out, lse = speedlight.attention(q, k, v, return_lse=True, backend="fa3", **options)
    for n in spiked:
        one = [t[n : n + 1] for t in (q, k, v)]
        ref, ref_lse = reference.attention(*one, return_lse=True, **options)
        _close(out[n : n + 1], ref, dtype)
        torch.testing.assert_close(lse[n : n + 1].double(), ref_lse, rtol=1e-5, atol=1e-4)
    others = [n for n in range(40) if n not in spiked]
    assert torch.equal(out[others], calm[others])
    for _ in range(20):
        assert torch.equal(out, speedlight.attention(q, k, v, backend="fa3", **options))
    cu = torch.arange(0, 40 * 700 + 1, 700, device="cuda", dtype=torch.int32)
    packed, packed_lse = speedlight.attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)), cu, cu, return_lse=True, backend="fa3", **options
    )
    _close(packed.view_as(out), out.double(), dtype)
    torch.testing.assert_close(packed_lse.view(4, 40, 700).transpose(0, 1), lse, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fa3_windows_whose_last_block_is_not_masked_on_the_right(head_dim):
    """One query, as when decoding; a last tile of one row; keys that end with a block; no right edge."""
    for seqlen_q, window in ((1, (256, 0)), (129, (256, 0)), (1024, (256, 256)), (1024, (256, None)), (3, (700, 40))):
        q, k, v = _qkv((2, seqlen_q, 4, head_dim), *[(2, 1024, 2, head_dim)] * 2)
        out, lse = speedlight.attention(q, k, v, window=window, return_lse=True, backend="fa3")
        ref, ref_lse = reference.attention(q, k, v, window=window, return_lse=True)
        _close(out, ref, q.dtype)
        assert (lse.double() - ref_lse).abs().max() < 1e-4, (seqlen_q, window)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
def test_fa3_with_values_near_the_largest_number():
    """Weights of 2^40 beside the first columns' maximum leave no room for them."""
    q, k, v = (torch.zeros(1, 256, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0] = 1
    k[:, :128, :, 0] = 8 * 28
    v += 2.0**100
    out = speedlight.attention(q, k, v, backend="fa3")
    _close(out, reference.attention(q, k, v), q.dtype)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("options", [dict(causal=True), {}], ids=str)
def test_fa3_passes_nan_and_infinity_on(options):
    """To the rows that see them, and to no others."""
    q, k, v = _qkv(*[(4, 500, 2, 128)] * 3)
    k[0, 40, 0, 3] = float("nan")
    k[1, 499, 1, 5] = float("inf")
    q[2, 130, 0, 7] = float("nan")
    v[3, 0, 1, 9] = float("-inf")
    out, lse = speedlight.attention(q, k, v, return_lse=True, backend="fa3", **options)
    ref, ref_lse = reference.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out.isfinite(), ref.isfinite())
    assert torch.equal(lse.isfinite(), ref_lse.isfinite())
    _close(out.where(ref.isfinite(), 0), ref.where(ref.isfinite(), 0), q.dtype)


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
def test_fa3_leaves_to_fa2_what_tma_cannot_address():
    """Odd strides and offsets: the same numbers as fa2 itself, and no copy of an input."""
    base = torch.randn(2, 100, 2, 80, device="cuda", dtype=torch.bfloat16)
    odd = [base[..., n : n + 64] for n in (1, 3, 5)]
    expanded = [base[:1, ..., :64].expand(2, 100, 2, 64)] * 3
    for q, k, v in (odd, expanded):
        out = speedlight.attention(q, k, v, causal=True, backend="fa3")
        assert torch.equal(out, speedlight.attention(q, k, v, causal=True, backend="fa2"))


@pytest.mark.skipif(not _HOPPER, reason="needs Hopper")
def test_fa3_is_no_less_accurate_than_it_has_to_be():
    """The error of out against float64 is that of rounding P and out once each, in bf16 and fp16."""
    for dtype, bound in ((torch.bfloat16, 3.0e-3), (torch.float16, 4.0e-4)):
        q, k, v = _qkv(*[(1, 1024, 2, 128)] * 3, dtype=dtype)
        ref = reference.attention(q, k, v)
        out = speedlight.attention(q, k, v, backend="fa3")
        assert (out.double() - ref).norm() <= bound * ref.norm()
