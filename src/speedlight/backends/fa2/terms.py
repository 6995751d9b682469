"""What is added to scores and what hides them, besides windows: ALiBi, biases and masks, as tensors or functions; and
dropout, for the FlashAttention-2 kernels.

``terms`` goes through the kernels as one tuple: (b, h, q_start, k_start, alibi_slopes, (bias, numbers, aux), (mask,
numbers, aux), dropout_seed, threshold, what start_terms returned). Numbers are the strides along rows and keys, and how
many there are. For what is not used it holds None, and nothing is compiled for it. Pairs are index blocks that
broadcast against each other, so the functions below serve scores and their transpose.

A pair is hidden where its score is -inf afterwards, by a mask or a bias of -inf. Keys that no row of a tile sees may
hold anything, and 0 * NaN is NaN: the kernels clear them before any product, and rows that see nothing likewise.
"""

import triton
import triton.language as tl

from ... import dropout
from .common import LOG2_E

PHILOX_M, PHILOX_W = tl.constexpr(dropout.PHILOX_M), tl.constexpr(dropout.PHILOX_W)
ROUNDS = tl.constexpr(dropout.ROUNDS)


@triton.jit
def start_terms(b, h, batch, alibi_slopes, stride_ab, bias, stride_bb, stride_bh, mask, stride_mb, stride_mh,
                dropout_seed, NATURAL: tl.constexpr):  # fmt: skip
    """What is the same for all pairs of a batch entry and head: the slope, where bias and mask start, and the key and
    counter of dropout; 0 for what is not used, as a function cannot return None."""
    slope, bias_h, mask_h, key, counter_xor = 0.0, 0, 0, 0, 0
    b = tl.minimum(b, batch - 1)  # rows after the last sequence have no keys, but what follows is read for them, too
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * stride_ab + h)
        if not NATURAL:
            slope = slope * LOG2_E
    if bias is not None:
        bias_h = bias + (tl.cast(b, tl.int64) * stride_bb + tl.cast(h, tl.int64) * stride_bh)
    if mask is not None:
        mask_h = mask + (tl.cast(b, tl.int64) * stride_mb + tl.cast(h, tl.int64) * stride_mh)
    if dropout_seed is not None:
        seed = tl.load(dropout_seed)
        x0, x1 = philox_2x32(_word(b), _word(h), _word(seed))
        key, counter_xor = philox_2x32(x0, x1, _word(seed >> 32))
    return slope, bias_h, mask_h, key, counter_xor


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
def kept(x, i, j, terms):
    """x where dropout keeps a pair, else 0. As dropout.keep_mask."""
    if terms[7] is not None:
        key, counter_xor = terms[9][3], terms[9][4]
        x0, x1 = philox_2x32(_word(i & ~8) ^ counter_xor, _word(j & ~8), key)
        word = tl.where((i & 8) != 0, x1, x0) >> _word((j & 8) * 2)
        x = tl.where((word & 0xFFFF).to(tl.int32) >= terms[8], x, 0.0)
    return x


@triton.jit
def _of_pairs(tensor, numbers, i, j, seqlen_q, seqlen_k, other):
    """The values of a tensor that broadcasts to (Sq, Sk)."""
    stride_q, stride_k, rows, keys = numbers
    inside = (i < tl.minimum(seqlen_q, rows)) & (j < tl.minimum(seqlen_k, keys))
    return tl.load(tensor + i.to(tl.int64) * stride_q + j.to(tl.int64) * stride_k, mask=inside, other=other)


@triton.jit
def _value(tensor, AXIS: tl.constexpr, h, q_start, k_start, i, j, seqlen_q, seqlen_k):
    """Of an aux tensor, at a head (1), at rows (2) or at keys (3)."""
    if AXIS == 1:
        return tl.load(tensor + h)
    elif AXIS == 2:
        return tl.load(tensor + q_start + i, mask=i < seqlen_q, other=0)
    else:
        return tl.load(tensor + k_start + j, mask=j < seqlen_k, other=0)


@triton.jit
def _call(FN: tl.constexpr, AXES: tl.constexpr, aux, b, h, q_start, k_start, i, j, seqlen_q, seqlen_k):
    """What a modifier function returns for pairs. AXES: of its aux tensors, two bits each."""
    if AXES == 0:
        return FN(b, h, i, j, seqlen_q, seqlen_k)
    else:
        x0 = _value(aux[0], AXES % 4, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
        if AXES < 4:
            return FN(b, h, i, j, seqlen_q, seqlen_k, x0)
        else:
            x1 = _value(aux[1], AXES // 4 % 4, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
            if AXES < 16:
                return FN(b, h, i, j, seqlen_q, seqlen_k, x0, x1)
            else:
                x2 = _value(aux[2], AXES // 16 % 4, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
                if AXES < 64:
                    return FN(b, h, i, j, seqlen_q, seqlen_k, x0, x1, x2)
                else:
                    x3 = _value(aux[3], AXES // 64, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
                    return FN(b, h, i, j, seqlen_q, seqlen_k, x0, x1, x2, x3)


@triton.jit
def distance(i, j, seqlen_q, seqlen_k):
    return tl.abs(i + (seqlen_k - seqlen_q) - j).to(tl.float32)


@triton.jit
def with_terms(s, i, j, seqlen_q, seqlen_k, terms, BIAS_FN: tl.constexpr, BIAS_AXES: tl.constexpr,
               MASK_FN: tl.constexpr, MASK_AXES: tl.constexpr):  # fmt: skip
    """Scores with ALiBi and bias added, -inf where bias or mask hide. With a bias they are in natural units: its least
    finite value, of which users make masks, times log2 e would be -inf."""
    b, h, q_start, k_start, alibi_slopes, of_bias, of_mask, _seed, _threshold, started = terms
    bias, bias_numbers, bias_aux = of_bias
    mask, mask_numbers, mask_aux = of_mask
    if alibi_slopes is not None:
        s = s - started[0] * distance(i, j, seqlen_q, seqlen_k)
    if bias is not None:
        x = _of_pairs(started[1], bias_numbers, i, j, seqlen_q, seqlen_k, 0.0).to(tl.float32)
        s = tl.where(x == float("-inf"), x, s + x)
    if BIAS_FN is not None:
        x = _call(BIAS_FN, BIAS_AXES, bias_aux, b, h, q_start, k_start, i, j, seqlen_q, seqlen_k)
        x = (x + tl.zeros_like(s)).to(tl.float32)
        s = tl.where(x == float("-inf"), x, s + x)
    if mask is not None:
        s = tl.where(_of_pairs(started[2], mask_numbers, i, j, seqlen_q, seqlen_k, 0) != 0, s, float("-inf"))
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
