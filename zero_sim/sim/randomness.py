"""Each rank's own random numbers: torch's, Python's and numpy's default generators.

A process has one of each. Under the baton the state of the rank that gets it is put in place, and
the state of whoever had it is taken out.
"""

from __future__ import annotations

import ctypes
import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class _Saved:
    """The random state of one rank while it does not hold the baton."""

    torch_state: torch.Tensor  # 1D, bytes
    python_state: tuple[Any, ...]
    numpy_state: dict[str, Any]
    numpy_words: bytes


class Randomness:
    """Moves the process's random state between one owner at a time and its saved place."""

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}

    def seed(self, owner: int, seed: int) -> None:
        """Give an owner the state that the three libraries have after being seeded with `seed`."""
        self._saved[owner] = _seeded(seed)

    def take_out(self, owner: int) -> None:
        """Save the process's state as `owner`'s."""
        saved = self._saved.get(owner)
        words = _numpy_words()
        # Reading numpy's whole state costs 30 us, comparing its words 1 us; the words tell all
        # except whether a second normal deviate is kept for later.
        if saved is None or saved.numpy_words != words or saved.numpy_state["has_gauss"]:
            numpy_state = np.random.get_state(legacy=False)
        else:
            numpy_state = saved.numpy_state
        self._saved[owner] = _Saved(
            torch.default_generator.get_state(), random.getstate(), numpy_state, words
        )

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Make `owner`'s saved state the process's; `previous`'s was taken out just before."""
        saved, before = self._saved[owner], self._saved[previous]
        torch.default_generator.set_state(saved.torch_state)
        random.setstate(saved.python_state)
        gauss_kept = saved.numpy_state["has_gauss"] or before.numpy_state["has_gauss"]
        if gauss_kept or saved.numpy_words != before.numpy_words:
            np.random.set_state(saved.numpy_state)


@functools.lru_cache(maxsize=8192)
def _seeded(seed: int) -> _Saved:
    numpy_state = np.random.RandomState(seed % 2**32).get_state(legacy=False)
    return _Saved(
        torch.Generator().manual_seed(seed).get_state(),
        random.Random(seed).getstate(),
        numpy_state,
        _words_of(numpy_state),
    )


def _numpy_words() -> bytes:
    """The 624 words and the position of numpy's global Mersenne Twister, as they lie in memory."""
    generator = np.random.mtrand._rand._bit_generator
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def _words_of(state: dict[str, Any]) -> bytes:
    inner = state["state"]
    return inner["key"].tobytes() + int(inner["pos"]).to_bytes(4, "little")
