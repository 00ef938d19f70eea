"""Random numbers that are functions of a key, not of how many were drawn before.

Random choices for a sample (its place in the epoch, its crop, its dropout mask) depend only on the run's seed, the
epoch and the sample's index. No cut into micro-batches, ranks or workers can then change them. The generator is
SplitMix64, a fixed bijection of 64-bit words, in torch's wrapping int64 arithmetic: the same bits on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_BITS = 24  # bits of a word that are used for a number: float32 holds them exactly


def _signed(word: int) -> int:
    """Return the int64 with the bits of a 64-bit word."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = z + _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _mix_word(z: int) -> int:
    z = (z + _GOLDEN) % _WORD
    z = (z ^ (z >> 30)) * _FIRST % _WORD
    z = (z ^ (z >> 27)) * _SECOND % _WORD
    return z ^ (z >> 31)


def sample_keys(indices: Tensor | Sequence[int], *, seed: int, epoch: int) -> Tensor:
    """Return one key per sample, int64 N, on the device of `indices`; a list gives keys on the CPU.

    Example:
        >>> whole = sample_keys(torch.arange(4), seed=0, epoch=3)
        >>> torch.equal(whole[2:], sample_keys([2, 3], seed=0, epoch=3))
        True
    """
    indices = torch.as_tensor(indices, dtype=torch.int64)
    return _mix(indices + _signed(_mix_word(_mix_word(seed % _WORD) + epoch)))


def words(keys: Tensor, draws: int, *, stream: int = 0) -> Tensor:
    """Return N×draws random 64-bit words as int64. Streams are independent: take one for each use of a key."""
    start = _mix(keys + _signed(_mix_word(stream % _WORD)))
    counter = torch.arange(1, draws + 1, device=keys.device) * _signed(_GOLDEN)
    return _mix(start[:, None] + counter)


def uniforms(keys: Tensor, draws: int, *, stream: int = 0) -> Tensor:
    """Return N×draws numbers in [0, 1), float32, multiples of 2⁻²⁴.

    Example:
        >>> u = uniforms(sample_keys(torch.arange(1000), seed=0, epoch=0), 2)
        >>> u.shape, bool((u >= 0).all() and (u < 1).all()), round(u.mean().item(), 1)
        (torch.Size([1000, 2]), True, 0.5)
    """
    return _shifted(words(keys, draws, stream=stream), 64 - _BITS).to(torch.float32) * 2.0**-_BITS


def integers(keys: Tensor, draws: int, *, bound: int, stream: int = 0) -> Tensor:
    """Return N×draws integers from 0 to bound − 1, int64; `bound` is at most 2²⁴.

    Example:
        >>> sorted(integers(sample_keys(torch.arange(100), seed=1, epoch=0), 1, bound=3).unique().tolist())
        [0, 1, 2]
    """
    if not 1 <= bound <= 1 << _BITS:
        raise ValueError(f"bound must be between 1 and {1 << _BITS}, got {bound}")
    return _shifted(words(keys, draws, stream=stream), 64 - _BITS) * bound >> _BITS


def permutation(samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of `samples` indices in one epoch, int64, on the CPU.

    Example:
        >>> permutation(5, seed=0, epoch=0).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    order = words(sample_keys(torch.arange(samples), seed=seed, epoch=epoch), 1, stream=_signed(_GOLDEN)).squeeze(1)
    return torch.argsort(order, stable=True)
