"""The dropout generator: known answers of Philox-2x32, the tile form against the element form, and its statistics."""

from __future__ import annotations

import pytest
import torch

from speedlight.dropout import dropout_key, keep_mask, keep_tile, philox_2x32

# Known answers of the authors' library Random123 for philox2x32 with 7 rounds: counter, key, result.
KNOWN = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers_on_ints_and_on_tensors(counter, key, result):
    assert philox_2x32(*counter, key) == result
    words = philox_2x32(*(torch.tensor(x) for x in (*counter, key)))
    assert tuple(int(word) for word in words) == result


@pytest.mark.parametrize("seed", [0, -5, 2**62 + 12345, -(2**63)])
def test_mask_is_the_formula_element_by_element(seed):
    threshold = 20_000
    for b, h, i, j in [(0, 2, 3, 5), (1, 3, 9, 13), (2, 5, 24, 8), (7, 0, 1 << 20, 15)]:
        key, counter_xor = dropout_key(seed, b, h)
        words = philox_2x32((i & ~8) ^ counter_xor, j & ~8, key)
        number = (i >> 3 & 1) * 2 + (j >> 3 & 1)
        word = words[number >> 1] >> 16 * (number & 1) & 0xFFFF
        kept = keep_mask(torch.tensor([seed]), *(torch.tensor(x) for x in (b, h, i, j)), threshold)
        assert bool(kept) == (word >= threshold)


TILES = [((0, 40), (0, 37)), ((5, 9), (13, 50)), ((17, 18), (0, 3)), ((8, 24), (24, 40))]


@pytest.mark.parametrize(("rows", "keys"), TILES)
def test_a_tile_is_part_of_the_mask(rows, keys):
    seed = torch.tensor([-77])
    b, h = torch.arange(3).view(-1, 1, 1, 1), torch.arange(2, 6).view(1, -1, 1, 1)
    whole = keep_mask(seed, b, h, torch.arange(*rows).view(-1, 1), torch.arange(*keys), 20_000)
    tile = keep_tile(*dropout_key(seed.reshape(()), b, h), rows, keys, 20_000)
    assert torch.equal(tile, whole)


def test_rate_and_independence():
    """Kept fraction, its spread over rows, columns and tiles, and correlations between neighbours, within 5 sigma."""
    p = 0.3
    b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(4).view(1, -1, 1, 1)
    n = 512
    keep = keep_mask(torch.tensor(7), b, h, torch.arange(n).view(-1, 1), torch.arange(n), round(p * 65536))
    z = (keep.double() - (1 - p)) / (p * (1 - p)) ** 0.5
    assert abs(z.mean() * z.numel() ** 0.5) < 5
    tiles = z.view(2, 4, n // 16, 16, n // 16, 16)
    for means, count in ((z.mean(-1), n), (z.mean(-2), n), (tiles.mean((3, 5)), 256)):
        scaled = means * count**0.5
        assert scaled.abs().max() < 6
        assert abs(scaled.var() - 1) < 5 * (2 / scaled.numel()) ** 0.5
    shifted = {
        "row + 1": (z[:, :, :-1], z[:, :, 1:]), "row + 8": (z[:, :, :-8], z[:, :, 8:]),
        "key + 1": (z[..., :-1], z[..., 1:]), "key + 8": (z[..., :-8], z[..., 8:]),
        "both + 8": (z[:, :, :-8, :-8], z[:, :, 8:, 8:]), "head": (z[:, :-1], z[:, 1:]), "batch": (z[:1], z[1:]),
        "transposed": (z.triu(1), z.mT.triu(1)),
    }  # fmt: skip
    for name, (one, other) in shifted.items():
        product = one * other
        assert abs(product.sum() / product.count_nonzero() ** 0.5) < 5, name
