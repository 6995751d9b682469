"""A genome as tokens: FASTA in, one uint8 tensor of nucleotides out.

Tokens are A 0, C 1, G 2, T 3 and N 4. U counts as T; every other IUPAC letter and a gap count as N, and one N separates
two records, so that no window is read across them unmarked.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import dnaio
import torch
from torch import Tensor

VOCABULARY = "ACGTN"
UNKNOWN = VOCABULARY.index("N")
MIN_LENGTH = 1_000
MAX_LENGTH = 50_000_000
EMBEDDED = "lambda_NC_001416.fa.gz"

_AMBIGUOUS = "NRYSWKMBDHV-."
_INVALID = 255


class DemoError(Exception):
    """The user's input cannot be used. The message is one sentence that says what and why."""


def _translation() -> bytes:
    """Byte -> token, 255 for letters that are no nucleotide."""
    table = bytearray([_INVALID]) * 256
    for letters, token in (("A", 0), ("C", 1), ("G", 2), ("TU", 3), (_AMBIGUOUS, UNKNOWN)):
        for letter in letters:
            table[ord(letter)] = table[ord(letter.lower())] = token
    return bytes(table)


_TOKEN_OF = _translation()


@dataclass(frozen=True)
class Genome:
    """`tokens` (uint8, length L) with where they came from; counts are in nucleotides, separators left out.

    `identifier` is the first word of the first record's header, `name` the rest of it. `known` counts A, C, G and T,
    `gc` is the share of G and C in them.
    """

    name: str
    identifier: str
    source: str
    records: int
    length: int
    known: int
    gc: float
    truncated: bool
    tokens: Tensor


def read_genome(path: str | Path | None = None, max_length: int = MAX_LENGTH) -> Genome:
    """Read every record of a FASTA file (plain, gzip, bzip2, xz or zstd); None reads the embedded phage lambda.

    Raises DemoError for a file that is missing, unreadable, not FASTA, empty, shorter than 1,000 bp, mostly ambiguous
    or not made of nucleotides. Reading stops at `max_length` nucleotides, which `truncated` then tells.
    """
    if path is None:
        with resources.as_file(resources.files("speedlight") / "data" / EMBEDDED) as embedded:
            return _read(Path(embedded), f"{EMBEDDED} (embedded)", max_length)
    return _read(Path(path), str(path), max_length)


def _read(path: Path, source: str, max_length: int) -> Genome:
    if not path.exists():
        raise DemoError(f"cannot read {path}: there is no such file.")
    if path.is_dir():
        raise DemoError(f"cannot read {path}: it is a directory, not a FASTA file.")
    try:
        names, parts = _records(path, max_length)
    except DemoError:
        raise
    except (dnaio.FileFormatError, dnaio.UnknownFileFormat, UnicodeError) as error:
        reason = "it is not text" if isinstance(error, UnicodeError) else _sentence(error)
        raise DemoError(f"cannot read {path}: it is not a FASTA file ({reason}).") from error
    except Exception as error:  # each compression library raises its own kind for a damaged file
        raise DemoError(f"cannot read {path}: {_sentence(error)}.") from error
    if not names:
        raise DemoError(f"cannot read {path}: it holds no FASTA record (no line starts with '>').")
    return _genome(path, source, names, parts, max_length)


def _records(path: Path, max_length: int) -> tuple[list[str], list[bytes]]:
    """Names and tokens of the records, in file order, up to `max_length` nucleotides."""
    names: list[str] = []
    parts: list[bytes] = []
    room = max_length
    with dnaio.open(path, fileformat="fasta") as reader:
        for record in reader:
            tokens = record.sequence[:room].encode("ascii").translate(_TOKEN_OF)
            bad = tokens.find(_INVALID)
            if bad >= 0:
                where = f"record {_short(record.name)!r} has {record.sequence[bad]!r} at position {bad + 1:,}"
                raise DemoError(f"cannot use {path}: {where}, which is no nucleotide (is this a protein?).")
            names.append(record.name)
            parts.append(tokens)
            room -= len(tokens)
            if room <= 0:
                break
    return names, parts


def _genome(path: Path, source: str, names: list[str], parts: list[bytes], max_length: int) -> Genome:
    length = sum(map(len, parts))
    if length == 0:
        raise DemoError(f"cannot use {path}: its sequence is empty.")
    if length < MIN_LENGTH:
        raise DemoError(f"cannot use {path}: {length:,} bp is too short, the demo needs at least {MIN_LENGTH:,} bp.")
    joined = bytes([UNKNOWN]).join(part for part in parts if part)
    counts = [sum(part.count(token) for part in parts) for token in range(len(VOCABULARY))]
    known = length - counts[UNKNOWN]
    identifier, _, title = names[0].partition(" ")
    identifier = identifier.strip("|") or "unnamed"
    title = title.strip() or identifier
    if known < length / 2:
        raise DemoError(f"cannot use {path}: only {known:,} of its {length:,} letters are A, C, G or T.")
    return Genome(
        name=title if len(names) == 1 else f"{title} and {len(names) - 1:,} more records",
        identifier=identifier,
        source=source,
        records=len(names),
        length=length,
        known=known,
        gc=(counts[1] + counts[2]) / known,
        truncated=length >= max_length,
        tokens=torch.frombuffer(bytearray(joined), dtype=torch.uint8),
    )


def _sentence(error: Exception) -> str:
    """An exception's text made to stand inside our own sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return _short(text.rstrip("."), 160)


def _short(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
