"""Philox4x32-10, a counter-based generator: a draw is a pure function of a key and a counter, on any device, in any order.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC'11).
"""

from __future__ import annotations

_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed_lo: int, seed_hi: int, step: int) -> float:
    """A number in [0, 1), 53 bits of it random. The seed's words may be signed, as int32 tables hold them."""
    high, low, _, _ = philox4x32((step, 0, 0, 0), (seed_lo & _WORD, seed_hi & _WORD))
    return ((high << 21) | (low >> 11)) * 2.0**-53
