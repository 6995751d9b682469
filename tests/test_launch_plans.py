"""The plans of the Triton backends: a repeated pass must hand every kernel the same tensors as a first one.

Runs without a GPU: kernels and driver are stand-ins that record addresses.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if target.interpreting():
    pytest.skip("the interpreter has no plans", allow_module_level=True)

from speedlight import Mask, launch
from speedlight.backends import fa2, fa3
from speedlight.backends.contract import Needs
from speedlight.problem import describe
from speedlight.target import Target


@pytest.fixture
def recorded(monkeypatch):
    """Launches as (kernel, {leading parameter: address}), through Triton or repeated alike."""
    launches = []

    class Kernel:
        def __init__(self, name, kernel):
            self.name, self.arg_names, self.params = name, kernel.arg_names, kernel.params

        def record(self, pointers):
            launches.append((self.name, dict(zip(self.arg_names, pointers, strict=False))))

        def __getitem__(self, grid):
            def first(*tensors, **args):
                self.count = len(tensors)
                self.record(list(map(address, tensors)))
                return SimpleNamespace(run=self.again, function=None, packed_metadata=None, metadata=None)

            return first

        def again(self, *arguments):
            self.record(list(map(address, arguments[9 : 9 + self.count])))

    def address(given):
        """Of a tensor, a TMA descriptor, or what is an address already."""
        given = getattr(given, "base", given)
        return given.data_ptr() if hasattr(given, "data_ptr") else given

    for name in (
        "_attn_fwd_kernel", "_attn_bwd_delta_kernel", "_attn_bwd_dkdv_kernel", "_attn_bwd_dq_kernel",
        "_attn_bwd_dbias_kernel", "_attn_bwd_heads_kernel",
    ):  # fmt: skip
        monkeypatch.setattr(fa2, name, Kernel(name, getattr(fa2, name)))
    monkeypatch.setattr(fa3, "_attn_fwd_kernel", Kernel("fa3", fa3._attn_fwd_kernel))
    monkeypatch.setattr(fa3, "_num_sms", lambda device: 132)
    monkeypatch.setattr(fa2, "target_of", lambda device: Target("cuda", 90))
    monkeypatch.setattr(launch, "_PLANS", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return launches


def _same_segment(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, segment_q, segment_kv):
    return segment_q == segment_kv


def _terms():
    """Everything that is added to scores or hides them."""
    segments = [(axis, torch.zeros(48, dtype=torch.int32)) for axis in ("q", "kv")]
    return dict(
        alibi_slopes=torch.randn(2), bias=torch.randn(1, 2, 48, 48), mask=Mask(_same_segment, segments),
        sink=torch.randn(2), dropout_p=0.1, dropout_seed=torch.tensor([5]),
    )  # fmt: skip


def _named_terms(inputs):
    aux = {f"mask_aux{n}": t for n, t in enumerate(inputs.mask_aux)}
    names = ("alibi_slopes", "bias", "mask", "sink", "dropout_seed")
    return {name: getattr(inputs, name) for name in names} | aux


def _inputs(varlen: bool, terms: bool = False):
    shape = (48, 2, 64) if varlen else (1, 48, 2, 64)
    q, k, v, out, dout = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.randn((2, 48) if varlen else (1, 2, 48))
    cu = (torch.tensor([0, 20, 48], dtype=torch.int32), torch.tensor([0, 30, 48], dtype=torch.int32))
    problem, inputs = describe(q, k, v, *(cu if varlen else ()), causal=True, **(_terms() if terms else {}))
    return problem, inputs, out, lse, dout


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "needs",
    [Needs(), Needs(q=False), Needs(k=False, v=False), Needs(q=False, k=False), Needs(*[True] * 6),
     Needs(False, False, False, False, True, True), Needs(False, False, False, True)],
)  # fmt: skip
@pytest.mark.parametrize("with_dlse", [False, True])
def test_a_repeated_backward_gives_each_kernel_what_a_first_one_does(recorded, varlen, needs, with_dlse):
    passes = []
    for _ in range(2):
        of_terms = needs.alibi_slopes or needs.bias or needs.sink
        problem, inputs, out, lse, dout = _inputs(varlen, of_terms)
        dlse = torch.randn_like(lse) if with_dlse else None
        grads = fa2.backward(problem, inputs, out, lse, dout, dlse, needs)
        roles = {
            "q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "lse": lse, "dout": dout, "dlse": dlse,
            "dq": grads.q, "dk": grads.k, "dv": grads.v,
            "cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k,
            **_named_terms(inputs),
        }  # fmt: skip
        if not needs.sink:
            roles["sink"] = None
        own: dict[str, set] = {name: set() for name in ("delta", "dslopes", "dslope", "dsink", "dbias")}
        for _, pointers in recorded:
            for name in own.keys() & pointers.keys():
                own[name].add(pointers.pop(name))
            for name, pointer in pointers.items():
                assert pointer == (None if roles.get(name) is None else roles[name].data_ptr()), name
        assert len(own["delta"]) == 1  # written by the first kernel, read by the others
        assert len(own["dslopes"] - {None}) == needs.alibi_slopes
        passes.append([(name, sorted(pointers)) for name, pointers in recorded])
        recorded.clear()
    assert passes[0] == passes[1]
    per_head = needs.alibi_slopes or needs.sink
    assert len(passes[0]) == (needs.q or needs.k or of_terms) + (needs.k or needs.v) + per_head + needs.bias


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("terms", [False, True])
def test_a_repeated_forward_does_too(recorded, varlen, terms):
    for n in range(2):
        problem, inputs, *_ = _inputs(varlen, terms)
        out, lse = fa2.forward(problem, inputs)
        [(_, pointers)] = recorded
        names = inputs._fields[:7]
        roles = dict(zip(names, inputs, strict=False)) | {"out": out, "lse": lse} | _named_terms(inputs)
        for name, pointer in pointers.items():
            assert pointer == (None if roles.get(name) is None else roles[name].data_ptr()), (n, name)
        recorded.clear()
    assert len(launch._PLANS) == 1


@pytest.mark.parametrize("varlen", [False, True])
def test_so_does_a_forward_through_tma(recorded, varlen, monkeypatch):
    for n in range(3):
        counter = torch.zeros(2, dtype=torch.int32)
        monkeypatch.setattr(fa3, "_counter", lambda device, counter=counter: counter)
        problem, inputs, *_ = _inputs(varlen)
        out, lse = fa3.forward(problem, inputs)
        [(name, pointers)] = recorded
        expected = (*inputs[:3], out, out, lse, counter, *inputs[3:7])
        assert name == "fa3"
        assert list(pointers.values()) == [None if t is None else t.data_ptr() for t in expected], n
        recorded.clear()
    assert len(launch._PLANS) == 1


def test_what_tma_cannot_address_goes_to_fa2(recorded, monkeypatch):
    """Odd starts, odd strides, strides of zero, and rows of out that do not start on 16 bytes."""
    monkeypatch.setattr(fa3, "_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    wide = torch.randn(2, 48, 2, 80, dtype=torch.bfloat16)
    q = wide[..., :64]
    for k, v in (
        (wide[..., 1:65], q), (q, wide[..., 2:66]), (q[:1].expand(2, 48, 2, 64), q), (q, wide[..., :60]),
        (torch.randn(2, 48, 2, 68, dtype=torch.bfloat16)[..., :64], q),
    ):  # fmt: skip
        problem, inputs = describe(q, k, v)
        for _ in range(2):  # built, and repeated
            expected = (*inputs[:3], *fa3.forward(problem, inputs))
            [(name, pointers)] = recorded
            assert name == "_attn_fwd_kernel", (k.stride(), v.shape)
            assert list(pointers.values())[:5] == [t.data_ptr() for t in expected]
            recorded.clear()
    for odd in (
        q,  # the strides of what was not aligned
        q[:, :, :1],
        q[:1],
        q.transpose(1, 2).contiguous().transpose(1, 2),
    ):  # axes of one element, other orders
        problem, inputs = describe(odd, odd, odd)
        fa3.forward(problem, inputs)
        [(name, _)] = recorded
        assert name == "fa3"
        recorded.clear()


@pytest.mark.parametrize("name", ["alibi_slopes", "bias", "mask", "sink", "dropout_p"])
def test_what_has_not_run_on_a_gpu_is_refused_there_until_asked_for(name, monkeypatch):
    terms = _terms()
    options = {name: terms[name]} | ({"dropout_seed": terms["dropout_seed"]} if name == "dropout_p" else {})
    problem, _ = describe(*[torch.empty(1, 48, 2, 64, dtype=torch.bfloat16)] * 3, **options)
    for asked_for in (False, True):
        monkeypatch.setattr(fa2, "TERMS_ON_GPU", asked_for)
        reason = fa2.supports(problem, Target("cuda", 90))
        assert reason is None if asked_for else "SPEEDLIGHT_FA2_TERMS" in reason
        monkeypatch.setattr(fa3, "unverified", lambda: None)
        assert "not supported" in fa3.supports(problem, Target("cuda", 90))


@pytest.mark.parametrize("needs", [Needs(), Needs(k=False, v=False), Needs(q=False, k=False)])
def test_what_tma_cannot_address_has_gradients_by_fa2(recorded, monkeypatch, needs):
    """By its kernels, from the tensors that fa3 has allocated."""
    monkeypatch.setattr(fa3, "OWN_BACKWARD", True)
    monkeypatch.setattr(fa3, "_counter", lambda device: torch.zeros(2, dtype=torch.int32))
    problem, inputs, out, lse, dout = _inputs(varlen=False)
    odd = torch.randn(1, 48, 2, 72, dtype=torch.bfloat16)[..., 1:65]
    for name in ("q", "k", "v", "dout"):
        given = inputs if name == "dout" else inputs._replace(**{name: odd})
        gradient = odd if name == "dout" else dout
        for _ in range(2):  # built, and repeated
            grads = fa3.backward(problem, given, out, lse, gradient, None, needs)
            roles = {
                "q": given.q, "k": given.k, "v": given.v, "out": out, "lse": lse, "dout": gradient,
                "dq": grads.q, "dk": grads.k, "dv": grads.v,
            }  # fmt: skip
            assert len(recorded) == needs.q + (needs.k or needs.v)
            for kernel, pointers in recorded:
                assert kernel in ("_attn_bwd_dq_kernel", "_attn_bwd_dkdv_kernel")
                assert pointers["delta"] is not None
                for role in roles.keys() & pointers.keys():
                    assert pointers[role] == (None if roles[role] is None else roles[role].data_ptr()), (name, role)
            assert len({pointers["delta"] for _, pointers in recorded}) == 1
            recorded.clear()
