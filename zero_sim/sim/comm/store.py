"""A world's key-value store, which c10d uses before a group exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.comm.timeouts import seconds_of, store_timed_out
from zero_sim.sim.failures import TimedOut


class KeyWait:
    """Ranks' wait for an unset key."""

    __slots__ = ("done", "key", "missing", "waiters")

    def __init__(self, key: str) -> None:
        self.key = key
        self.done = False
        self.missing: tuple[int, ...] = ()
        self.waiters: list[int] = []

    @property
    def doing(self) -> str:
        """See `Awaited.doing`."""
        return f"waits for key {self.key!r} of the store"


class SimStore(Store):
    """A store in memory. A wait passes on the baton instead of blocking the process.

    Args:
        wait: Blocks the calling rank, `wait(awaited, site, timeout_seconds)`.
        wake: Makes the ranks in a wait ready again.
    """

    def __init__(
        self, wait: Callable[[KeyWait, str, float | None], None], wake: Callable[[KeyWait], None]
    ) -> None:
        super().__init__()
        self._wait_for = wait
        self._wake = wake
        self._values: dict[str, bytes] = {}
        self._waits: dict[str, KeyWait] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key and wake its waiting ranks."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        waited = self._waits.pop(key, None)
        if waited is not None:
            waited.done = True
            self._wake(waited)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        # Counters are decimal text, as in torch's stores.
        value = int(self._values.get(key, b"0")) + amount
        self.set(key, str(value))
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if its value is `expected`, or if it is unset and `expected` is empty."""
        # In torch, an unset key counts as equal to an empty `expected`.
        current = self._values.get(key)
        if current == expected.encode() or (current is None and not expected):
            self.set(key, desired)
        return self._values.get(key, expected.encode())

    def append(self, key: str, value: bytes) -> None:
        """Append to a value."""
        self.set(key, self._values.get(key, b"") + bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block this rank until all keys are set.

        Raises:
            StoreTimedOut: The time-out, in simulated time, ended first.
        """
        # A key that is already set costs no turn.
        for key in keys:
            if key not in self._values:
                # Ranks that wait for the same key share the wait, and a row of the deadlock table.
                waited = self._waits.setdefault(key, KeyWait(key))
                file, line = call_site()
                try:
                    self._wait_for(waited, site_of(file, line), seconds_of(timeout))
                except TimedOut as error:
                    raise store_timed_out(error, keys) from None

    def delete_key(self, key: str) -> bool:
        """Remove a key. Return True if it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because a wait that cannot end is reported at once."""

    def clear(self) -> None:
        """Forget everything, between two runs."""
        self._values.clear()
        self._waits.clear()
