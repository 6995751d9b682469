"""The one list of attention problems that every backend is tested on.

``CASES`` are small enough for Triton's interpreter, ``GPU_CASES`` want a GPU. ``mixed_case(n)`` draws any number of
further combinations of options.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from speedlight.testing import Case

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


# Modifier functions: module-level, arithmetic and comparisons only, non-negative operands of %.
def prefix_lm(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
    return (kv_idx < 7) | (kv_idx <= q_idx + seqlen_k - seqlen_q)


def same_segment(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, segment_q, segment_kv):
    return segment_q == segment_kv


def all_but_every_third(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
    return (kv_idx + q_idx + 2 * h + b) % 3 != 0


def nothing(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
    return kv_idx + q_idx < 0


def quadratic_decay(b, h, q_idx, kv_idx, seqlen_q, seqlen_k):
    offset = (q_idx - kv_idx) * 0.1
    return offset * offset * -1.0 - 0.2 * h + 0.3 * b


def weighted_distance(b, h, q_idx, kv_idx, seqlen_q, seqlen_k, head_value, q_value, kv_value):
    return head_value * (q_idx - kv_idx) * 0.05 + q_value * kv_value


SEGMENTS = (("q", "segments"), ("kv", "segments"))
VALUES = (("head", "values"), ("q", "values"), ("kv", "values"))


def _varlen(name: str, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...] | None = None, **options) -> Case:
    return Case(name, lengths_q=lengths_q, lengths_k=lengths_q if lengths_k is None else lengths_k, **options)


_LENGTHS = (17, 1, 40, 8)
_LENGTHS_K = (25, 6, 30, 13)

DENSE = [
    # Lengths.
    Case("plain"),
    Case("odd_lengths", seqlen_q=37, seqlen_k=53),
    Case("more_queries", seqlen_q=53, seqlen_k=37),
    Case("one_query", seqlen_q=1, seqlen_k=45),
    Case("one_key", seqlen_q=45, seqlen_k=1),
    Case("one_token", seqlen_q=1, seqlen_k=1),
    Case("long", batch=1, num_heads=1, num_heads_kv=1, seqlen_q=200, seqlen_k=190),
    Case("scale", softmax_scale=0.6),
    Case("negative_scale", softmax_scale=-0.3),
    Case("large_scores", std=6.0),
    Case("huge_scores", std=30.0, seqlen_q=20, dtype=BF16),  # fp32 gradients would feel that lse is fp32
    # Causal and windows, bottom-right.
    Case("causal", causal=True),
    Case("causal_more_keys", causal=True, seqlen_q=33, seqlen_k=60),
    Case("causal_blind_rows", causal=True, seqlen_q=60, seqlen_k=33),
    Case("causal_one_query", causal=True, seqlen_q=1, seqlen_k=50),
    Case("causal_long", causal=True, batch=1, num_heads=1, num_heads_kv=1, seqlen_q=150, seqlen_k=200),
    Case("causal_long_blind_rows", causal=True, batch=1, num_heads=1, num_heads_kv=1, seqlen_q=200, seqlen_k=70),
    Case("window_left", window=(5, None)),
    Case("window_right", window=(None, 3)),
    Case("window_both", window=(7, 4)),
    Case("window_self", window=(0, 0)),
    Case("window_wide", window=(100, 100)),
    Case("window_causal", window=(6, None), causal=True),
    Case("window_causal_overrules_right", window=(6, 9), causal=True),
    Case("window_more_keys", window=(9, 2), seqlen_q=21, seqlen_k=47),
    Case("window_blind_rows", window=(4, 4), seqlen_q=61, seqlen_k=30),
    Case("window_left_unseen_keys", window=(3, None), seqlen_q=8, seqlen_k=50),
    Case("window_long", window=(40, 10), batch=1, num_heads=1, num_heads_kv=1, seqlen_q=200, seqlen_k=200),
    Case("window_narrow_long", window=(3, 0), batch=1, num_heads=1, num_heads_kv=1, seqlen_q=150, seqlen_k=200),
    # Softcap, with logits above the cap so that its derivative matters.
    Case("softcap", softcap=2.0, std=3.0),
    Case("softcap_causal", softcap=15.0, std=5.0, causal=True, seqlen_q=29, seqlen_k=44),
    Case("softcap_long", softcap=5.0, std=3.0, batch=1, num_heads=1, num_heads_kv=1, seqlen_q=130, seqlen_k=180),
    # ALiBi.
    Case("alibi", alibi="h", num_heads=3, num_heads_kv=3),
    Case("alibi_batched", alibi="bh"),
    Case("alibi_causal_more_keys", alibi="h", causal=True, seqlen_q=23, seqlen_k=51),
    Case("alibi_more_queries", alibi="h", seqlen_q=51, seqlen_k=23),
    Case("alibi_lse_grad", alibi="bh", lse_grad=True, seqlen_q=23),
    # Bias in every broadcast shape; capitals are stride-0 axes.
    *(
        Case(f"bias_{spec.replace('1', '_')}", bias=spec, num_heads=4, seqlen_q=33, seqlen_k=43)
        for spec in ("bhqk", "1hqk", "b1qk", "11qk", "hqk", "qk", "b11k", "1h1k", "b1q1", "1h11", "b111", "1111", "k")
    ),
    Case("bias_stride_0_heads", bias="bHqk", seqlen_q=33, seqlen_k=43),
    Case("bias_stride_0_batch", bias="BHqk", seqlen_q=33, seqlen_k=43),
    Case("bias_stride_0_keys", bias="bhqK", seqlen_q=33, seqlen_k=43),
    Case("bias_long", bias="1hqk", batch=2, seqlen_q=130, seqlen_k=140),
    Case("bias_causal_gqa", bias="1hqk", causal=True, num_heads=4, seqlen_q=33, seqlen_k=19),
    Case("bias_window", bias="bhqk", window=(8, 3)),
    # Masks.
    *(
        Case(f"mask_{spec.replace('1', '_')}", mask=spec, seqlen_q=35, seqlen_k=41)
        for spec in ("bhqk", "1hqk", "b1qk", "qk", "b11k", "1h1k", "b1q1", "k", "bHqk")
    ),
    Case("mask_causal", mask="b11k", causal=True, seqlen_q=30),
    Case("mask_long", mask="b1qk", num_heads=1, num_heads_kv=1, seqlen_q=130, seqlen_k=140),
    Case("mask_and_bias", mask="b11k", bias="1hqk"),
    # Functions.
    Case("mask_fn", mask_fn=prefix_lm, seqlen_q=31, seqlen_k=47),
    Case("mask_fn_heads", mask_fn=all_but_every_third),
    Case("mask_fn_segments", mask_fn=same_segment, mask_aux=SEGMENTS, seqlen_q=50, seqlen_k=35),
    Case("mask_fn_nothing", mask_fn=nothing),
    Case("mask_fn_long", mask_fn=all_but_every_third, batch=1, seqlen_q=130, seqlen_k=150, causal=True),
    Case("bias_fn", bias_fn=quadratic_decay),
    Case("bias_fn_aux", bias_fn=weighted_distance, bias_aux=VALUES, seqlen_q=31, seqlen_k=47),
    Case("bias_fn_mask_fn", bias_fn=quadratic_decay, mask_fn=same_segment, mask_aux=SEGMENTS, causal=True),
    # Sink.
    Case("sink", sink=True),
    Case("sink_blind_rows", sink=True, causal=True, seqlen_q=40, seqlen_k=22, lse_grad=True),
    Case("sink_softcap", sink=True, softcap=1.5, std=2.0),
    Case("sink_window_gqa", sink=True, window=(5, 0), num_heads=4),
    # Dropout.
    Case("dropout", dropout_p=0.2),
    Case("dropout_half", dropout_p=0.5, seqlen_q=33, seqlen_k=57),
    Case("dropout_nearly_all", dropout_p=0.97),
    Case("dropout_gqa_causal", dropout_p=0.15, causal=True, num_heads=4, lse_grad=True),
    Case("dropout_long", dropout_p=0.1, batch=1, seqlen_q=140, seqlen_k=150),
    # Heads and head dimensions.
    *(
        Case(f"heads_{h}_{hk}", batch=1, num_heads=h, num_heads_kv=hk, seqlen_q=17, seqlen_k=23, causal=True)
        for h, hk in ((1, 1), (4, 2), (8, 1), (9, 3), (6, 2), (14, 7), (5, 5))
    ),
    Case("gqa_long", batch=1, num_heads=4, seqlen_q=130, seqlen_k=150),
    *(
        Case(f"dim_{d}", batch=1, num_heads=1, num_heads_kv=1, head_dim=d, seqlen_q=24, seqlen_k=37)
        for d in (1, 2, 3, 8, 24, 33, 40, 56, 64, 72, 80, 96, 100, 128, 160, 192, 256, 320, 512, 576)
    ),
    *(
        Case(f"dim_{d}_{dv}", batch=1, head_dim=d, head_dim_v=dv, num_heads_kv=1, seqlen_q=24, seqlen_k=37)
        for d, dv in ((16, 8), (24, 40), (64, 128), (128, 64), (192, 128), (40, 72), (1, 16), (16, 1), (576, 512))
    ),
    # Lengths in use, NaN behind them.
    Case("seqused_k", seqused_k=(40, 13)),
    Case("seqused_q", seqused_q=(7, 40)),
    Case("seqused_causal", seqused_q=(25, 40), seqused_k=(40, 33), causal=True),
    Case("seqused_none", seqused_q=(0, 12), seqused_k=(9, 0), causal=True, lse_grad=True),
    Case("seqused_alibi_window", seqused_q=(25, 31), seqused_k=(40, 11), window=(6, 3), alibi="h", sink=True),
    Case("seqused_bias_mask_fn", seqused_q=(25, 31), seqused_k=(40, 11), bias="1hqk", mask_fn=prefix_lm),
    # Memory layouts.
    *(
        Case(f"layout_{layout}", layout=layout, num_heads=4, num_heads_kv=2, causal=True, seqlen_q=28, seqlen_k=28)
        for layout in (
            "heads_first", "wide", "every_second_row", "stepped", "dim_outermost", "one_head", "packed", "mixed"
        )
    ),
    Case("layout_one_query", layout="heads_first", seqlen_q=1, seqlen_k=30),
    # The loss sees lse.
    Case("lse_grad", lse_grad=True),
    Case("lse_grad_blind_rows", lse_grad=True, causal=True, seqlen_q=44, seqlen_k=31),
    Case("lse_grad_gqa_window", lse_grad=True, num_heads=4, window=(6, 2), softcap=3.0, std=2.0),
    # Nothing to do.
    Case("empty_batch", batch=0),
    Case("no_queries", seqlen_q=0),
    Case("no_keys", seqlen_k=0, lse_grad=True),
    Case("no_keys_sink", seqlen_k=0, sink=True, lse_grad=True),
]  # fmt: skip

VARLEN = [
    _varlen("varlen", _LENGTHS),
    _varlen("varlen_one_sequence", (33,), (45,)),
    _varlen("varlen_cross", _LENGTHS, _LENGTHS_K),
    _varlen("varlen_no_max", _LENGTHS, _LENGTHS_K, int_max_seqlen=False),
    _varlen("varlen_causal", _LENGTHS, causal=True),
    _varlen("varlen_causal_cross", _LENGTHS, _LENGTHS_K, causal=True),
    _varlen("varlen_long", (130, 3, 67), (90, 70, 140), causal=True, num_heads=1, num_heads_kv=1),
    _varlen("varlen_zero_lengths", (0, 3, 0, 5, 1, 0), (4, 0, 0, 6, 1, 2), num_heads=4),
    _varlen("varlen_zero_lengths_causal", (0, 3, 0, 5, 1, 0), (4, 0, 0, 6, 1, 2), causal=True, lse_grad=True),
    _varlen("varlen_all_empty", (0, 0), (0, 0), tail=3, lse_grad=True),
    _varlen("varlen_no_sequence", (), (), tail=5),
    _varlen("varlen_no_queries", (0, 0), (4, 9)),
    _varlen("varlen_many_short", (1, 2, 1, 3, 1, 1, 2, 4, 1, 1), (2, 1, 5, 3, 1, 4, 2, 4, 6, 1), causal=True),
    _varlen("varlen_tail", _LENGTHS, _LENGTHS_K, tail=7),
    _varlen("varlen_tail_causal_lse_grad", _LENGTHS, _LENGTHS_K, tail=70, causal=True, lse_grad=True),
    _varlen("varlen_window", _LENGTHS, _LENGTHS_K, window=(6, 3)),
    _varlen("varlen_softcap", _LENGTHS, _LENGTHS_K, softcap=3.0, std=3.0, causal=True),
    _varlen("varlen_alibi", _LENGTHS, _LENGTHS_K, alibi="h"),
    _varlen("varlen_alibi_batched", _LENGTHS, _LENGTHS_K, alibi="bh", causal=True, lse_grad=True),
    _varlen("varlen_bias", _LENGTHS, _LENGTHS_K, bias="bhqk"),
    _varlen("varlen_bias_shared", _LENGTHS, _LENGTHS_K, bias="1hqk", causal=True),
    _varlen("varlen_bias_keys", _LENGTHS, _LENGTHS_K, bias="b11k"),
    _varlen("varlen_mask", _LENGTHS, _LENGTHS_K, mask="b1qk"),
    _varlen("varlen_mask_keys", _LENGTHS, _LENGTHS_K, mask="b11k", causal=True),
    _varlen("varlen_mask_fn", _LENGTHS, _LENGTHS_K, mask_fn=prefix_lm),
    _varlen("varlen_mask_fn_segments", (30, 25), (33, 20), mask_fn=same_segment, mask_aux=SEGMENTS),
    _varlen("varlen_bias_fn", _LENGTHS, _LENGTHS_K, bias_fn=weighted_distance, bias_aux=VALUES),
    _varlen("varlen_sink", _LENGTHS, _LENGTHS_K, sink=True, causal=True, lse_grad=True),
    _varlen("varlen_dropout", _LENGTHS, _LENGTHS_K, dropout_p=0.3, num_heads=4),
    _varlen("varlen_gqa", _LENGTHS, _LENGTHS_K, num_heads=6, num_heads_kv=2, head_dim_v=24),
    _varlen("varlen_mqa_dims", _LENGTHS, num_heads=3, num_heads_kv=1, head_dim=40, head_dim_v=72, causal=True),
    _varlen("varlen_seqused", _LENGTHS, _LENGTHS_K, seqused_q=(9, 1, 0, 8), seqused_k=(25, 0, 12, 3), tail=2),
    _varlen("varlen_seqused_k_causal", _LENGTHS, _LENGTHS_K, seqused_k=(20, 6, 30, 2), causal=True, alibi="h"),
    _varlen("varlen_packed", _LENGTHS, layout="packed", num_heads=4, causal=True),
    _varlen("varlen_heads_first", _LENGTHS, _LENGTHS_K, layout="heads_first"),
    _varlen("varlen_mixed_layouts", _LENGTHS, _LENGTHS_K, layout="mixed", tail=3),
]

COMBINED = [
    Case(
        "combined", seqlen_q=37, seqlen_k=52, num_heads=4, head_dim=24, head_dim_v=16, causal=True, window=(20, None),
        softcap=4.0, std=2.0, alibi="bh", bias="1hqk", mask="b11k", sink=True, dropout_p=0.2, lse_grad=True,
    ),
    Case(
        "combined_functions", seqlen_q=52, seqlen_k=37, num_heads=6, num_heads_kv=2, window=(25, 12), softcap=6.0,
        std=2.0, alibi="h", bias_fn=weighted_distance, bias_aux=VALUES, mask_fn=all_but_every_third, sink=True,
        dropout_p=0.1, seqused_q=(52, 30), seqused_k=(25, 37), lse_grad=True, layout="heads_first",
    ),
    _varlen(
        "combined_varlen", (17, 0, 40, 8), (25, 6, 30, 0), tail=5, num_heads=4, head_dim=24, head_dim_v=40, causal=True,
        window=(15, 4), softcap=4.0, std=2.0, alibi="bh", bias="b1qk", mask="1h1k", sink=True, dropout_p=0.2,
        lse_grad=True,
    ),
    _varlen(
        "combined_varlen_functions", (30, 21), (33, 20), tail=1, num_heads=4, causal=True, softcap=8.0,
        alibi="h", bias_fn=quadratic_decay, mask_fn=same_segment, mask_aux=SEGMENTS, sink=True, dropout_p=0.3,
        seqused_q=(30, 15), seqused_k=(28, 20), lse_grad=True, layout="mixed",
    ),
]  # fmt: skip


def mixed_case(n: int, largest: int = 60) -> Case:
    """The n-th random combination of options."""
    r = random.Random(n)

    def some(chance: float, *values):
        return r.choice(values) if r.random() < chance else None

    num_heads_kv, group = r.choice((1, 2, 3)), r.choice((1, 1, 2, 3))
    batch = r.randint(1, 3)
    lengths_q = tuple(r.randint(1, largest) for _ in range(batch))
    lengths_k = tuple(r.randint(1, largest) for _ in range(batch))
    options = dict(
        num_heads=num_heads_kv * group, num_heads_kv=num_heads_kv, head_dim=r.choice((4, 16, 20, 32)),
        head_dim_v=some(0.3, 8, 24), causal=r.random() < 0.4,
        window=(some(0.3, 0, 3, 11, largest), some(0.3, 0, 2, 9)), softcap=some(0.3, 1.0, 5.0) or 0.0,
        std=r.choice((1.0, 2.0)), alibi=some(0.3, "h", "bh") or "", sink=r.random() < 0.3,
        dropout_p=some(0.3, 0.1, 0.6) or 0.0, lse_grad=r.random() < 0.5,
        layout=some(0.3, "heads_first", "wide", "mixed") or "contiguous",
    )  # fmt: skip
    match some(0.5, "tensor", "function", "aux"):
        case "tensor":
            options["bias"] = r.choice(("bhqk", "1hqk", "b11k", "qk", "b1q1"))
        case "function":
            options["bias_fn"] = quadratic_decay
        case "aux":
            options.update(bias_fn=weighted_distance, bias_aux=VALUES)
    match some(0.5, "tensor", "function", "aux"):
        case "tensor":
            options["mask"] = r.choice(("bhqk", "1hqk", "b11k", "qk", "b1q1"))
        case "function":
            options["mask_fn"] = r.choice((prefix_lm, all_but_every_third))
        case "aux":
            options.update(mask_fn=same_segment, mask_aux=SEGMENTS)
    varlen = r.random() < 0.5
    limits_q = lengths_q if varlen else (max(lengths_q),) * batch
    limits_k = lengths_k if varlen else (max(lengths_k),) * batch
    if r.random() < 0.3:
        options["seqused_q"] = tuple(r.randint(0, n) for n in limits_q)
    if r.random() < 0.3:
        options["seqused_k"] = tuple(r.randint(0, n) for n in limits_k)
    if varlen:
        tail = some(0.3, 1, 5) or 0
        return Case(f"mixed_{n}", lengths_q=lengths_q, lengths_k=lengths_k, tail=tail, **options)
    return Case(f"mixed_{n}", batch=batch, seqlen_q=limits_q[0], seqlen_k=limits_k[0], **options)


MIXED = [mixed_case(n) for n in range(40)]

_FLOAT32 = [*DENSE, *VARLEN, *COMBINED, *MIXED]

_OTHER_DTYPES = (
    "plain", "odd_lengths", "long", "one_query", "causal_more_keys", "causal_blind_rows", "causal_long",
    "causal_long_blind_rows", "lse_grad_blind_rows", "gqa_long", "heads_9_3", "dim_24_40", "window_both",
    "softcap_causal",
    "alibi_causal_more_keys", "bias__hqk", "bias_causal_gqa", "mask_bhqk", "mask_fn_heads", "bias_fn_aux",
    "sink_window_gqa", "dropout_gqa_causal", "dim_33", "dim_64", "dim_128", "dim_256", "dim_192_128", "seqused_causal",
    "layout_packed", "layout_heads_first", "lse_grad_gqa_window", "varlen_causal_cross", "varlen_long",
    "varlen_zero_lengths", "varlen_tail", "combined", "combined_functions", "combined_varlen",
    "combined_varlen_functions",
)  # fmt: skip
_BY_NAME = {case.name: case for case in _FLOAT32}
_SHORT = {BF16: "bf16", F16: "f16", F64: "f64"}

CASES = [
    *_FLOAT32,
    *(replace(_BY_NAME[n], name=f"{n}_{short}", dtype=d) for d, short in _SHORT.items() for n in _OTHER_DTYPES),
    replace(_BY_NAME["bias__hqk"], name="bias_f32_on_bf16", dtype=BF16, bias_dtype=F32),
    replace(_BY_NAME["bias_b__k"], name="bias_f32_on_f16", dtype=F16, bias_dtype=F32),
]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "case names must be unique"


_LARGE = dict(batch=2, num_heads=4, num_heads_kv=2, head_dim=64, dtype=BF16)
_PACKED = ((1000, 0, 1, 517, 2048, 63, 129), (1500, 77, 1, 300, 2048, 64, 0))

GPU_CASES = [
    Case("gpu_plain", seqlen_q=1024, seqlen_k=1024, **_LARGE),
    Case("gpu_causal", seqlen_q=2048, seqlen_k=2048, causal=True, **_LARGE),
    Case("gpu_causal_odd", seqlen_q=1111, seqlen_k=1999, causal=True, **_LARGE),
    Case("gpu_causal_blind_rows", seqlen_q=1999, seqlen_k=1111, causal=True, lse_grad=True, **_LARGE),
    Case("gpu_window", seqlen_q=2001, seqlen_k=2001, window=(256, 0), **_LARGE),
    Case("gpu_window_both", seqlen_q=1500, seqlen_k=1203, window=(130, 70), **_LARGE),
    Case("gpu_softcap", seqlen_q=1024, seqlen_k=1217, softcap=15.0, std=4.0, causal=True, **_LARGE),
    Case("gpu_alibi", seqlen_q=1000, seqlen_k=1300, alibi="bh", causal=True, lse_grad=True, **_LARGE),
    Case("gpu_bias", seqlen_q=777, seqlen_k=1025, bias="1hqk", **_LARGE),
    Case("gpu_mask", seqlen_q=777, seqlen_k=1025, mask="b1qk", **_LARGE),
    Case("gpu_mask_fn", seqlen_q=1024, seqlen_k=1024, mask_fn=same_segment, mask_aux=SEGMENTS, **_LARGE),
    Case("gpu_bias_fn", seqlen_q=900, seqlen_k=1024, bias_fn=weighted_distance, bias_aux=VALUES, **_LARGE),
    Case("gpu_sink", seqlen_q=1024, seqlen_k=1024, sink=True, window=(128, 0), lse_grad=True, **_LARGE),
    Case("gpu_dropout", seqlen_q=1024, seqlen_k=1100, dropout_p=0.17, causal=True, **_LARGE),
    Case("gpu_decode", seqlen_q=1, seqlen_k=8000, causal=True, **_LARGE),
    Case("gpu_few_queries", seqlen_q=5, seqlen_k=4097, causal=True, seqused_k=(4097, 1203), **_LARGE),
    *(
        Case(f"gpu_dim_{d}_{str(dtype)[6:]}", batch=1, num_heads=4, num_heads_kv=1, head_dim=d, seqlen_q=700,
             seqlen_k=900, causal=True, dtype=dtype, lse_grad=True)
        for d in (32, 64, 80, 96, 128, 160, 192, 256, 512) for dtype in (BF16, F16, F32)
    ),
    *(
        Case(f"gpu_dim_{d}_{dv}", batch=1, num_heads=4, num_heads_kv=2, head_dim=d, head_dim_v=dv, seqlen_q=700,
             seqlen_k=900, causal=True, dtype=BF16)
        for d, dv in ((192, 128), (128, 256), (64, 512), (40, 72), (256, 64))
    ),
    _varlen("gpu_varlen", *_PACKED, num_heads=4, head_dim=64, dtype=BF16),
    _varlen("gpu_varlen_causal", *_PACKED, num_heads=4, head_dim=128, dtype=BF16, causal=True, tail=33, lse_grad=True),
    _varlen("gpu_varlen_window", *_PACKED, num_heads=4, head_dim=64, dtype=F16, window=(200, 50), alibi="bh"),
    _varlen("gpu_varlen_dropout", *_PACKED, num_heads=4, head_dim=64, dtype=BF16, dropout_p=0.1, sink=True),
    _varlen("gpu_varlen_many", (7,) * 400, (9,) * 400, num_heads=4, head_dim=64, dtype=BF16, causal=True),
    *(replace(mixed_case(n, largest=400), name=f"gpu_mixed_{n}", dtype=(BF16, F16, F32)[n % 3])
      for n in range(1000, 1120)),
]  # fmt: skip
