"""What is added to scores and what hides them, besides windows: ALiBi, biases and masks, as tensors or functions; and
dropout, for the FlashAttention-2 kernels.

``terms`` goes through the kernels as one tuple, made for each program and head: for what is not used it holds None, and
nothing is compiled for it. Pairs are index blocks that broadcast against each other, so the functions below serve scores
and their transpose.

A pair is hidden where its score is -inf afterwards, by a mask or a bias of -inf. Keys that no row of a tile sees may hold
anything, and 0 * NaN is NaN: the kernels clear them before any product, and rows that see nothing likewise.
"""

import triton
import triton.language as tl

from ... import dropout
from .common import LOG2_E

PHILOX_M, PHILOX_W = tl.constexpr(dropout.PHILOX_M), tl.constexpr(dropout.PHILOX_W)
ROUNDS = tl.constexpr(dropout.ROUNDS)


@triton.jit
def make_terms(b, h, q_start, k_start, alibi_slopes, stride_ab, bias, bias_numbers, mask, mask_numbers, bias_aux,
               mask_aux, dropout_seed, threshold, NATURAL: tl.constexpr):  # fmt: skip
    """bias_numbers, mask_numbers: strides along (b, h, q, k), and the rows and keys that there are."""
    key, counter_xor = None, None
    if dropout_seed is not None:
        seed = tl.load(dropout_seed)
        x0, x1 = philox_2x32(_word(b), _word(h), _word(seed))
        key, counter_xor = philox_2x32(x0, x1, _word(seed >> 32))
    slope = None
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * stride_ab + h)
        if not NATURAL:
            slope = slope * LOG2_E
    if bias is not None:
        bias += tl.cast(b, tl.int64) * bias_numbers[0] + tl.cast(h, tl.int64) * bias_numbers[1]
    if mask is not None:
        mask += tl.cast(b, tl.int64) * mask_numbers[0] + tl.cast(h, tl.int64) * mask_numbers[1]
    of_bias, of_mask, of_dropout = (bias, bias_numbers, bias_aux), (mask, mask_numbers, mask_aux), (key, counter_xor)
    return b, h, q_start, k_start, slope, of_bias, of_mask, of_dropout, threshold


@triton.jit
def _word(x):
    """The low 32 bits."""
    return tl.cast(x, tl.uint32)


@triton.jit
def philox_2x32(x0, x1, key):
    """As dropout.philox_2x32."""
    for _ in tl.static_range(ROUNDS):
        high = tl.umulhi(x0, PHILOX_M)
        low = x0 * PHILOX_M
        x0 = high ^ key ^ x1
        x1 = low
        key = key + PHILOX_W
    return x0, x1


@triton.jit
def kept(x, i, j, terms, DROPOUT: tl.constexpr):
    """x where dropout keeps a pair, else 0. As dropout.keep_mask."""
    if DROPOUT:
        key, counter_xor = terms[7]
        x0, x1 = philox_2x32(_word(i & ~8) ^ counter_xor, _word(j & ~8), key)
        word = tl.where((i & 8) != 0, x1, x0) >> _word((j & 8) * 2)
        x = tl.where((word & 0xFFFF).to(tl.int32) >= terms[8], x, 0.0)
    return x


@triton.jit
def _of_pairs(tensor, numbers, i, j, seqlen_q, seqlen_k, other):
    """The values of a tensor that broadcasts to (Sq, Sk)."""
    inside = (i < tl.minimum(seqlen_q, numbers[4])) & (j < tl.minimum(seqlen_k, numbers[5]))
    return tl.load(tensor + i.to(tl.int64) * numbers[2] + j.to(tl.int64) * numbers[3], mask=inside, other=other)


@triton.jit
def _value(tensor, AXIS: tl.constexpr, h, q_start, k_start, i, j, seqlen_q, seqlen_k):
    """Of an aux tensor, at a head, at rows or at keys."""
    if AXIS == "head":
        return tl.load(tensor + h)
    elif AXIS == "q":
        return tl.load(tensor + q_start + i, mask=i < seqlen_q, other=0)
    else:
        return tl.load(tensor + k_start + j, mask=j < seqlen_k, other=0)


@triton.jit
def _call(FN: tl.constexpr, AXES: tl.constexpr, aux, b, h, q_start, k_start, i, j, seqlen_q, seqlen_k):
    """What a modifier function returns for pairs."""
    if len(AXES) == 0:
        return FN(b, h, i, j, seqlen_q, seqlen_k)
    x0 = _value(aux[0], AXES[0], h, q_start, k_start, i, j, seqlen_q, seqlen_k)
    if len(AXES) == 1:
        return FN(b, h, i, j, seqlen_q, seqlen_k, x0)
    x1 = _value(aux[1], AXES[1], h, q_start, k_start, i, j, seqlen_q, seqlen_k)
    if len(AXES) == 2:
        return FN(b, h, i, j, seqlen_q, seqlen_k, x0, x1)
    x2 = _value(aux[2], AXES[2], h, q_start, k_start, i, j, seqlen_q, seqlen_k)
    if len(AXES) == 3:
        return FN(b, h, i, j, seqlen_q, seqlen_k, x0, x1, x2)
    x3 = _value(aux[3], AXES[3], h, q_start, k_start, i, j, seqlen_q, seqlen_k)
    return FN(b, h, i, j, seqlen_q, seqlen_k, x0, x1, x2, x3)


@triton.jit
def distance(i, j, seqlen_q, seqlen_k):
    return tl.abs(i + (seqlen_k - seqlen_q) - j).to(tl.float32)


@triton.jit
def with_terms(s, i, j, seqlen_q, seqlen_k, terms, BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr,
               MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr):  # fmt: skip
    """Scores with ALiBi and bias added, -inf where bias or mask hide. With a bias they are in natural units: its least
    finite value, of which users make masks, times log2 e would be -inf."""
    b, h, q_start, k_start, slope, of_bias, of_mask = terms[:7]
    bias, bias_numbers, bias_aux = of_bias
    mask, mask_numbers, mask_aux = of_mask
    if slope is not None:
        s = s - slope * distance(i, j, seqlen_q, seqlen_k)
    if bias is not None:
        x = _of_pairs(bias, bias_numbers, i, j, seqlen_q, seqlen_k, 0.0).to(tl.float32)
        s = tl.where(x == float("-inf"), x, s + x)
    if BIAS_FN is not None:
        x = _call(BIAS_FN, BIAS_AXES, bias_aux, b, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
        x = (x + tl.zeros_like(s)).to(tl.float32)
        s = tl.where(x == float("-inf"), x, s + x)
    if mask is not None:
        s = tl.where(_of_pairs(mask, mask_numbers, i, j, seqlen_q, seqlen_k, 0) != 0, s, float("-inf"))
    if MASK_FN is not None:
        x = _call(MASK_FN, MASK_AXES, mask_aux, b, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
        s = tl.where(x, s, float("-inf"))
    return s


@triton.jit
def weights(s, m, NATURAL: tl.constexpr):
    """exp(s - m)."""
    if NATURAL:
        return tl.exp2((s - m) * LOG2_E)
    else:
        return tl.exp2(s - m)


@triton.jit
def take_part(tile, s):
    """A tile of keys, or rows, with those cleared whose scores, along the first axis of s, are all hidden."""
    return tl.where((tl.max(s, 0) > float("-inf"))[:, None], tile, 0.0).to(tile.dtype)
