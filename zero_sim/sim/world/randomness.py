"""Random numbers per rank: default generators of torch, its device, Python and numpy.

A process has only one default generator for each. When the baton moves, the new holder's saved
state replaces the previous holder's.
"""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zero_sim.host.device import has_accelerator, random_state, seeded_state, set_random_state

_STATE_BYTES = 625 * 4
_python_generator: Any = random._inst  # pyrefly: ignore [missing-attribute]
# In random.Random's C struct, the words follow the object's header.
_python_address = id(_python_generator) + object.__basicsize__
_numpy_generator: Any = np.random.mtrand._rand
_NOTHING_KEPT: dict[str, Any] = {"has_gauss": 0}
"""The only field read from numpy's state if the words are known."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """Random state of a rank while it does not hold the baton."""

    torch_state: torch.Tensor | None  # 1D, bytes
    """None while the owner holds the baton."""
    python_words: bytes
    python_gauss: float | None
    numpy_words: bytes
    numpy_state: dict[str, Any]
    device_state: torch.Tensor | None
    """None without a device."""


class Randomness:
    """Saves and restores the process's random state for each owner."""

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}
        self._seeds: dict[int, int] = {}
        """Seeds of owners that have not had the baton since."""
        self._has_device = has_accelerator()

    def seed(self, owner: int, seed: int) -> None:
        """Make an owner begin as if it had seeded torch, Python and numpy with `seed`."""
        self._seeds[owner] = seed

    def begin(self, caller: int) -> None:
        """Save the current state as `caller`'s. Ranks begin with their seeds."""
        self.take_out(caller)

    def take_out(self, owner: int) -> None:
        """Save the process's state as `owner`'s."""
        saved = self._saved.get(owner)
        words = _numpy_words()
        # numpy draws normal deviates in pairs and keeps the second. Everything else is in the
        # words.
        if saved is None or saved.numpy_words != words or _needs_accessor(saved):
            numpy_state = np.random.get_state(legacy=False)
        else:
            numpy_state = saved.numpy_state
        self._saved[owner] = _Saved(
            torch.default_generator.get_state(),
            _python_words(),
            _python_generator.gauss_next,
            words,
            numpy_state,
            random_state() if self._has_device else None,
        )

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Restore `owner`'s saved state, just after `previous`'s was taken out."""
        seed = self._seeds.pop(owner, None)
        if seed is not None:
            self._saved[owner] = self._seed_in_place(seed)
            return
        saved, before = self._saved[owner], self._saved[previous]
        assert saved.torch_state is not None
        torch.default_generator.set_state(saved.torch_state)
        if saved.device_state is not None:
            set_random_state(saved.device_state)
        _set_python_words(saved.python_words)
        _python_generator.gauss_next = saved.python_gauss
        # A kept deviate, old or new, is not in the words.
        if _needs_accessor(saved) or _needs_accessor(before):
            np.random.set_state(saved.numpy_state)
        else:
            ctypes.memmove(_numpy_address(), saved.numpy_words, _STATE_BYTES)

    # [Note: seeding in place] It takes thirty times as long to make a new generator and read its
    # words as to seed the existing generator. So an owner that has not drawn yet has only a seed.
    def _seed_in_place(self, seed: int) -> _Saved:
        """Seed the process's generators. Return the state that `take_out` compares."""
        torch.default_generator.manual_seed(seed)
        if self._has_device:
            set_random_state(seeded_state(seed))
        _python_generator.seed(seed)
        # numpy's seeds have 32 bits.
        _numpy_generator.seed(seed % 2**32)
        return _Saved(None, b"", None, _numpy_words(), _NOTHING_KEPT, None)


# [Note: raw words] Python's and numpy's generators are Mersenne Twisters: 624 words and a position,
# 2,500 bytes. Their accessors box every word (10 to 70 us), which takes far longer than passing the
# baton. So the words are compared and copied as raw memory. numpy's accessor is only used if the
# words changed, to find out if a second normal deviate is kept. An import-time test checks that the
# interpreter stores Python's words at the expected address. If not, Python's accessor is used.
def _needs_accessor(saved: _Saved) -> bool:
    return not saved.numpy_words or bool(saved.numpy_state["has_gauss"])


def _numpy_address() -> int:
    return _numpy_generator._bit_generator.ctypes.state_address


def _numpy_words() -> bytes:
    """Return words and position of numpy's global generator; empty if it is no Twister."""
    # Checked at each call, because np.random.set_bit_generator may have replaced it.
    if type(_numpy_generator._bit_generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(_numpy_address(), _STATE_BYTES)


def _words_of(generator: random.Random) -> bytes:
    """Return position and words of a Python generator, read with its accessor."""
    *words, position = generator.getstate()[1]
    return struct.pack("<625I", position, *words)


def _read_words() -> bytes:
    return ctypes.string_at(_python_address, _STATE_BYTES)


def _write_words(words: bytes) -> None:
    ctypes.memmove(_python_address, words, _STATE_BYTES)


def _read_slowly() -> bytes:
    return _words_of(_python_generator)


def _write_slowly(words: bytes) -> None:
    position, *rest = struct.unpack("<625I", words)
    _python_generator.setstate((3, (*rest, position), None))


# See [Note: raw words]. The first test ensures that the read stays inside the object.
_laid_out_as_known = (
    type(_python_generator).__basicsize__ >= object.__basicsize__ + _STATE_BYTES
    and _read_words() == _read_slowly()
)
_python_words = _read_words if _laid_out_as_known else _read_slowly
_set_python_words = _write_words if _laid_out_as_known else _write_slowly
