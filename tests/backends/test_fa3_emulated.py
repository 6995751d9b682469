"""`fa3` on CPU tensors: its Gluon kernels in the emulator (gluon_emulator.py), those around them in Triton's
interpreter, against the float64 reference.
"""

from __future__ import annotations

import os

import pytest
import torch

from speedlight import target

if target.triton_problem() is not None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs the Triton kernels around its own in the interpreter", allow_module_level=True)

import gluon_emulator

from speedlight import launch
from speedlight.backends import fa3
from speedlight.backends.contract import Needs
from speedlight.problem import describe
from speedlight.testing import Case, check

BF16, F16 = torch.bfloat16, torch.float16


class Emulated:
    """fa3 with its launches executed here. ``how``: the emulator's options."""

    def __init__(self, monkeypatch):
        self.how, self.names, self.counter = {}, [], torch.zeros(2, dtype=torch.int32)
        self.alter = lambda record: record
        monkeypatch.setattr(launch, "run", self._run)
        monkeypatch.setattr(fa3, "_counter", lambda device: self.counter)
        monkeypatch.setattr(fa3, "_num_sms", lambda device: 3)
        monkeypatch.setattr(fa3, "OWN_BACKWARD", True)
        monkeypatch.setattr(fa3, "unverified", lambda: None)

    def _run(self, key, device, tensors, build):
        records = build()
        for record in [records] if isinstance(records, launch.Launch) else records:
            self.names.append(record.kernel.__name__)
            if hasattr(record.kernel, "is_gluon"):
                gluon_emulator.run(self.alter(record), **self.how)
                assert self.counter.tolist() == [0, 0]
            else:
                record.kernel[record.grid](*record.leading().values(), **record.args, **record.meta())

    def attention(self, q, k, v, *cu_seqlens, return_lse, **options):
        problem, inputs = describe(*(t.detach() for t in (q, k, v)), *cu_seqlens, **options)
        assert fa3.supports(problem, target.Target("cuda", 90)) is None
        return _Attention.apply(q, k, v, problem, inputs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, problem, inputs):
        ctx.set_materialize_grads(False)
        out, lse = fa3.forward(problem, inputs)
        ctx.save_for_backward(out, lse)
        ctx.problem, ctx.inputs = problem, inputs
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        grads = fa3.backward(ctx.problem, ctx.inputs, *ctx.saved_tensors, dout, dlse, Needs())
        return grads.q, grads.k, grads.v, None, None


@pytest.fixture
def emulated(monkeypatch):
    return Emulated(monkeypatch)


EAGER, LAZY = {}, dict(lazy=True, seed=1, together=True)
_LENGTHS_Q, _LENGTHS_K = (70, 0, 130, 5), (100, 40, 150, 0)


def _case(name: str, seqlen_q: int = 200, seqlen_k: int = 200, head_dim: int = 64, heads: int = 2, **options) -> Case:
    options = dict(batch=1, num_heads=heads, num_heads_kv=1, dtype=BF16) | options
    return Case(name, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, **options)


def _packed(name: str, lengths_q=_LENGTHS_Q, lengths_k=_LENGTHS_K, **options) -> Case:
    return _case(name, lengths_q=lengths_q, lengths_k=lengths_k, tail=3, **options)


CASES = [
    _case("plain", 256, 256, dtype=F16),
    _case("odd", 130, 300, head_dim=16, batch=2, heads=1),
    _case("causal", 256, 256, causal=True),
    _case("causal_odd", 200, 200, head_dim=40, head_dim_v=24, dtype=F16, causal=True),
    _case("causal_more_keys", 70, 290, causal=True, lse_grad=True),
    _case("causal_blind_rows", 290, 70, causal=True, lse_grad=True),
    _case("window", 270, 270, window=(70, 20)),
    _case("window_left", 300, 300, window=(130, None), dtype=F16),
    _case("window_right", 140, 260, window=(None, 50)),
    _case("softcap", 140, 260, softcap=3.0, std=3.0, causal=True),
    _case("gqa", 140, 140, heads=6, num_heads_kv=2, causal=True, lse_grad=True),
    _case("seqused", 140, 260, batch=3, heads=1, seqused_q=(140, 0, 70), seqused_k=(200, 100, 0)),
    _case("scale_negative", 140, 260, softmax_scale=-0.2, causal=True),
    _packed("varlen"),
    _packed("varlen_causal", causal=True, lse_grad=True, dtype=F16),
    _packed("varlen_window", window=(40, 20)),
    _packed("varlen_seqused", seqused_q=(60, 0, 130, 2), seqused_k=(100, 30, 20, 0), causal=True),
]
OF_128 = [
    _case("plain", 128, 256, head_dim=128, heads=1),
    _packed("varlen_causal", head_dim=128, heads=1, causal=True),
]


@pytest.mark.parametrize("how", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dim_64(emulated, case, how):
    emulated.how = how
    check(emulated.attention, case)
    assert emulated.names == [
        "_attn_fwd_kernel", "_attn_bwd_preprocess_kernel", "_attn_bwd_kernel", "_attn_bwd_convert_kernel"
    ]  # fmt: skip


@pytest.mark.parametrize("how", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("case", OF_128, ids=lambda case: case.name)
def test_dim_128(emulated, case, how):
    emulated.how = how
    check(emulated.attention, case)
