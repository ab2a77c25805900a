"""Random numbers as pure functions of a key, bit for bit those of examples/gpt_cpp/random.h: no generator state, so
nothing that is drawn depends on what was drawn before, on the ZeRO stage or on which rank holds a parameter."""

import numpy as np
import numpy.typing as npt
import xxhash

Bits = npt.NDArray[np.uint64]
MASK64 = 2**64 - 1


def digest64(data: bytes) -> int:
    """64-bit xxHash3: digests of structure, not security."""
    return xxhash.xxh3_64_intdigest(data)


def mix64_array(x: Bits) -> Bits:
    """64 well mixed bits of each 64-bit counter (the finalizer of SplitMix64).
    Ref: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, section 5."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix64(x: int) -> int:
    """The same for one number, modulo 2^64."""
    return int(mix64_array(np.array([x & MASK64], dtype=np.uint64))[0])


def key_of(first: int, *rest: int) -> int:
    """A key of an ordered list of numbers: key_of(seed, step, rank) and key_of(seed, rank, step) differ."""
    key = mix64(first)
    for number in rest:
        key = mix64(key ^ (number & MASK64))
    return key


def counters(key: int, start: int, stop: int, step: int = 1) -> Bits:
    """key + start, key + start + step, ... below key + stop, modulo 2^64."""
    return np.arange(start, stop, step, dtype=np.uint64) + np.uint64(key)


def unit_interval(bits: int) -> float:
    """A double in [0, 1) from the upper 53 bits."""
    return (bits >> 11) * 2.0**-53


def scaled_uniform(count: int, key: int, deviation: float) -> npt.NDArray[np.float32]:
    """`count` independent uniform numbers of mean 0 and standard deviation `deviation`, a function of the key and the
    index only."""
    pairs = mix64_array(counters(key, 0, count, 2))  # two numbers of 24 bits from one mix
    bits24 = np.stack([pairs >> np.uint64(40), (pairs >> np.uint64(16)) & np.uint64(0xFFFFFF)], axis=1).reshape(-1)[
        :count
    ]
    scale = np.float32(deviation * 1.7320508075688772) * np.float32(2.0**-23)
    return (bits24.astype(np.int32) - 2**23).astype(np.float32) * scale
