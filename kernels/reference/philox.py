"""Philox4x32-10: random numbers as a pure function of key and counter (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), so that a request's draws do not depend on what else is in its batch.
"""

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(key: int, counter: int) -> tuple[int, int, int, int]:
    """Four 32-bit numbers for a 64-bit key and a 128-bit counter, least significant words first."""
    k0, k1 = key & _LOW, key >> 32 & _LOW
    c0, c1, c2, c3 = (counter >> shift & _LOW for shift in (0, 32, 64, 96))
    for _ in range(ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & _LOW, first >> 32 ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) with 53 random bits: draw number ``draw`` of ``seed``."""
    x0, x1, _, _ = philox4x32(seed, draw)
    return float((x1 << 32 | x0) >> 11) * 2.0**-53
