"""Which keys a range of query rows can see, and the transpose: the integer formulas behind every tile loop.

Row i of a sequence sits at position i + seqlen_k - seqlen_q (bottom-right alignment) and sees the keys from position -
left to position + right, both included. An unlimited side is ``UNLIMITED``. Row and key ranges are half-open, may reach
past the sequence (the rest is ignored), and come back clamped to it, with lo <= hi always.

The same functions run here on ints and, wrapped by ``triton.jit``, in kernels. Hence each stands alone, and uses only
+, -, *, min and max. Sums of a length and ``UNLIMITED`` stay below 2^31 for lengths up to 2^30.
"""

UNLIMITED = 1 << 30


def key_range(m_lo, m_hi, seqlen_q, seqlen_k, left, right):
    """Keys visible to at least one row in [m_lo, m_hi)."""
    m_hi = min(m_hi, seqlen_q)
    any_row = min(max(m_hi - m_lo, 0), 1)
    lo = min(max(m_lo + seqlen_k - seqlen_q - left, 0), seqlen_k)
    hi = min(m_hi + seqlen_k - seqlen_q + right, seqlen_k)
    return lo, lo + max(hi - lo, 0) * any_row


def full_key_range(m_lo, m_hi, seqlen_q, seqlen_k, left, right):
    """Keys visible to every row in [m_lo, m_hi)."""
    m_hi = min(m_hi, seqlen_q)
    any_row = min(max(m_hi - m_lo, 0), 1)
    lo = min(max(m_hi - 1 + seqlen_k - seqlen_q - left, 0), seqlen_k)
    hi = min(m_lo + 1 + seqlen_k - seqlen_q + right, seqlen_k)
    return lo, lo + max(hi - lo, 0) * any_row


def query_range(n_lo, n_hi, seqlen_q, seqlen_k, left, right):
    """Rows that see at least one key in [n_lo, n_hi)."""
    n_hi = min(n_hi, seqlen_k)
    any_key = min(max(n_hi - n_lo, 0), 1)
    lo = min(max(n_lo + seqlen_q - seqlen_k - right, 0), seqlen_q)
    hi = min(n_hi + seqlen_q - seqlen_k + left, seqlen_q)
    return lo, lo + max(hi - lo, 0) * any_key


def full_query_range(n_lo, n_hi, seqlen_q, seqlen_k, left, right):
    """Rows that see every key in [n_lo, n_hi)."""
    n_hi = min(n_hi, seqlen_k)
    any_key = min(max(n_hi - n_lo, 0), 1)
    lo = min(max(n_hi - 1 + seqlen_q - seqlen_k - right, 0), seqlen_q)
    hi = min(n_lo + 1 + seqlen_q - seqlen_k + left, seqlen_q)
    return lo, lo + max(hi - lo, 0) * any_key


def seen_keys(seqlen_q, seqlen_k, left, right):
    """Keys that at least one row of the sequence sees."""
    any_row = min(seqlen_q, 1)
    lo = min(max(seqlen_k - seqlen_q - left, 0), seqlen_k)
    hi = min(seqlen_k + right, seqlen_k)
    return lo, lo + max(hi - lo, 0) * any_row


def seeing_rows(seqlen_q, seqlen_k, left, right):
    """Rows of the sequence that see at least one key."""
    any_key = min(seqlen_k, 1)
    lo = min(max(seqlen_q - seqlen_k - right, 0), seqlen_q)
    hi = min(seqlen_q + left, seqlen_q)
    return lo, lo + max(hi - lo, 0) * any_key
