"""Waits in torch's own stores (TCPStore, FileStore, HashStore), if a rank makes one.

torch waits for a key in C++, where a simulated rank would keep all others from setting the key. So
while a world is open, a rank that waits in such a store lets others run. Each write to any torch
store wakes the rank if its wait is over. The deadlock table shows the wait, and the store's
time-out counts simulated time, as in `zero_sim.sim.comm.timeouts`. A program that polls a store,
for example with `check` in a loop, also lets others run.

A thread that a rank started may also set the key. If such a thread exists and no rank can run, the
rank waits by the clock, up to the time-out.
"""

from __future__ import annotations

import errno
import functools
import inspect
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.comm.timeouts import (
    clients_timed_out,
    connect_timed_out,
    seconds_of,
    store_timed_out,
)
from zero_sim.sim.failures import TimedOut

_WAITING_IN_C = (TCPStore, FileStore, HashStore)
_WRITES = ("set", "append", "multi_set", "queue_push")
_LOOK_SECONDS = 0.001
"""Interval between checks if another thread ended the wait."""

# torch's own methods, which `uninstall` restores.
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_joined: dict[int, int] = {}
"""Number of connected clients by port, for stores that count their clients."""


class StoreWait:
    """A rank's wait that a write to a store may end."""

    __slots__ = ("doing", "done", "missing", "ready", "waiters")

    def __init__(self, doing: str, ready: Callable[[], bool]) -> None:
        self.doing = doing
        self.ready = ready
        self.done = False
        self.missing: tuple[int, ...] = ()
        self.waiters: list[int] = []


class StoreWaits:
    """A world's waits in torch's stores.

    Args:
        wait: Blocks the calling rank, `wait(awaited, site, timeout_seconds)`.
        poll: Gives every ready rank a turn, `poll(awaited, site)`.
        wake: Makes the ranks in a wait ready again.
    """

    def __init__(
        self,
        *,
        wait: Callable[[StoreWait, str, float | None], None],
        poll: Callable[[StoreWait, str], None],
        wake: Callable[[StoreWait], None],
    ) -> None:
        self._wait = wait
        self._poll = poll
        self._wake = wake
        self._waits: list[StoreWait] = []
        self._not_of_program: set[threading.Thread] = set()

    def begin(self) -> None:
        """Forget everything, before a run."""
        self._waits.clear()
        # Only threads started in the run can end a wait of its program.
        self._not_of_program = set(threading.enumerate())

    def until(self, ready: Callable[[], bool], doing: str, timeout: timedelta) -> None:
        """Block the calling rank until `ready()`. `doing` describes the wait.

        Raises:
            TimedOut: The time-out, in simulated time, ended first.
        """
        # A loop, because another rank may run before the woken rank and empty the queue.
        while not ready():
            waited = StoreWait(doing, ready)
            self._waits.append(waited)
            try:
                self._wait(waited, _site(), seconds_of(timeout))
            except TimedOut:
                if not self._await_helpers(ready, timeout):
                    raise
            finally:
                if waited in self._waits:
                    self._waits.remove(waited)

    def poll(self, doing: str) -> None:
        """Let other ranks run, because the calling rank polled without success."""
        self._poll(StoreWait(doing, lambda: False), _site())

    def look(self) -> None:
        """Wake the ranks whose waits are over. Called after each write."""
        # A copy, because the loop removes entries.
        for waited in [each for each in self._waits if each.ready()]:
            self._waits.remove(waited)
            waited.done = True
            self._wake(waited)

    def _await_helpers(self, ready: Callable[[], bool], timeout: timedelta) -> bool:
        """Wait by the clock for threads that ranks started. Return True if the wait is over."""
        end = time.monotonic() + timeout.total_seconds()
        while not ready():
            # Any thread started since the run began may set the key.
            helpers = set(threading.enumerate()) - self._not_of_program
            if not helpers or time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


class Ranks(Protocol):
    """Access to the calling rank's world; `stores` is None in other threads."""

    stores: StoreWaits | None


def install(ranks: Ranks) -> None:
    """Replace torch's waiting methods in rank threads."""
    instead = dict.fromkeys(_WRITES, _write) | {
        "add": _add,
        "compare_set": _compare_set,
        "wait": _wait,
        "get": _get,
        "multi_get": _multi_get,
        "queue_pop": _queue_pop,
        "queue_len": _queue_len,
        "check": _check,
        "barrier": _barrier,
    }
    for name, function in instead.items():
        # Not on Store itself: C++ would take the method for an override by a Python store.
        for owner in (*_WAITING_IN_C, PrefixStore):
            if hasattr(Store, name):  # Not every version of torch has all.
                _replace(owner, name, functools.partial(_call, ranks, name, function))
    _replace(TCPStore, "__init__", functools.partial(_connect, ranks))


def uninstall() -> None:
    """Restore torch's own methods."""
    # `__init__` was the class's own attribute; the others hide those inherited from Store.
    TCPStore.__init__ = _originals.pop((TCPStore, "__init__"))
    for owner, name in _originals:
        delattr(owner, name)
    _originals.clear()


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    original = _originals[owner, name] = getattr(owner, name)

    @functools.wraps(original)
    def method(store: Any, *args: Any, **kwargs: Any) -> Any:
        return function(store, *args, **kwargs)

    setattr(owner, name, method)


def _call(
    ranks: Ranks,
    name: str,
    instead: Callable[..., Any],
    store: Store,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the replacement if a rank uses a store that waits in C++, or else torch's method."""
    original = functools.partial(getattr(Store, name), store)
    # A PrefixStore can also wrap a SimStore, whose waits are safe.
    if ranks.stores is None or not isinstance(_innermost(store), _WAITING_IN_C):
        return original(*args, **kwargs)
    return instead(ranks.stores, original, store, *args, **kwargs)


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _kind(store: Store) -> str:
    return type(_innermost(store)).__name__


def _timeout(store: Store, wanted: timedelta | None = None) -> timedelta:
    own: Any = store
    return own.timeout if wanted is None else wanted


def _call_torch(name: str, store: Store, *args: Any) -> Any:
    """Call torch's own method, which must not wait."""
    return getattr(Store, name)(store, *args)


def _site() -> str:
    return site_of(*call_site())


def _write(
    waits: StoreWaits, original: Callable[..., Any], store: Store, *args: Any, **kwargs: Any
) -> Any:
    came = original(*args, **kwargs)
    waits.look()
    return came


def _add(
    waits: StoreWaits, original: Callable[..., Any], store: Store, key: str, amount: int
) -> int:
    value = original(key, amount)
    if amount:
        # Adding 0 reads the counter, which counts as a poll.
        waits.look()
    else:
        waits.poll(f"polls counter {key!r} of a {_kind(store)}")
    return value


def _compare_set(
    waits: StoreWaits,
    original: Callable[..., Any],
    store: Store,
    key: str,
    expected_value: str,
    desired_value: str,
) -> bytes:
    value = original(key, expected_value, desired_value)
    # If the exchange failed, the program may try again in a loop.
    if value == desired_value.encode():
        waits.look()
    else:
        waits.poll(f"tries to exchange {expected_value!r} in key {key!r} of a {_kind(store)}")
    return value


def _wait(
    waits: StoreWaits,
    original: Callable[..., Any],
    store: Store,
    keys: Sequence[str],
    timeout: timedelta | None = None,
) -> None:
    _await_keys(waits, store, keys, _timeout(store, timeout))


def _await_keys(waits: StoreWaits, store: Store, keys: Sequence[str], timeout: timedelta) -> None:
    doing = f"waits for {_named(keys)} of a {_kind(store)}"
    try:
        waits.until(lambda: bool(_call_torch("check", store, keys)), doing, timeout)
    except TimedOut as error:
        raise store_timed_out(error, _shown(store, keys)) from None


def _shown(store: Store, keys: Sequence[str]) -> list[str]:
    """Return keys as torch's messages show them: a TCPStore puts a slash before each."""
    return [f"/{key}" if _kind(store) == "TCPStore" else key for key in keys]


def _named(keys: Sequence[str]) -> str:
    return f"key{'s' if len(keys) > 1 else ''} {', '.join(map(repr, keys))}"


def _get(waits: StoreWaits, original: Callable[..., Any], store: Store, key: str) -> bytes:
    # After the wait the key is set, so torch's method does not block.
    _await_keys(waits, store, [key], _timeout(store))
    return original(key)


def _multi_get(
    waits: StoreWaits, original: Callable[..., Any], store: Store, keys: Sequence[str]
) -> list[bytes]:
    _await_keys(waits, store, keys, _timeout(store))
    return original(keys)


def _queue_pop(
    waits: StoreWaits, original: Callable[..., Any], store: Store, key: str, block: bool = True
) -> bytes:
    # A FileStore has no queues, and torch's method raises.
    if block and not isinstance(_innermost(store), FileStore):
        doing = f"waits for queue {key!r} of a {_kind(store)}"
        try:
            waits.until(lambda: _call_torch("queue_len", store, key) > 0, doing, _timeout(store))
        except TimedOut as error:
            raise store_timed_out(error, _shown(store, [key])) from None
    return original(key, block)


def _queue_len(waits: StoreWaits, original: Callable[..., Any], store: Store, key: str) -> int:
    count = original(key)
    if not count:
        waits.poll(f"polls the empty queue {key!r}")
    return count


def _check(
    waits: StoreWaits, original: Callable[..., Any], store: Store, keys: Sequence[str]
) -> bool:
    there = original(keys)
    if not there:
        waits.poll(f"polls {_named(keys)} of a {_kind(store)}")
    return there


def _barrier(
    waits: StoreWaits,
    original: Callable[..., Any],
    store: Store,
    key: str,
    world_size: int,
    timeout: timedelta | None = None,
) -> None:
    # Use torch's own keys: a TCPStore counts in the key itself, other stores in keys below it.
    counter = key if isinstance(_innermost(store), TCPStore) else f"{key}/num_members"
    # Repeats torch's own barrier, which would wait in C++.
    _call_torch("add", store, counter, 1)
    if counter != key and int(_call_torch("get", store, counter)) >= world_size:
        _call_torch("set", store, f"{key}/last_member", "1")
    waits.look()
    doing = f"waits in barrier {key!r} of a {_kind(store)}"
    try:
        waits.until(
            lambda: int(_call_torch("get", store, counter)) >= world_size,
            doing,
            _timeout(store, timeout),
        )
    except TimedOut as error:
        raise store_timed_out(error, _shown(store, [key])) from None


def _connect_arguments(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(seconds=300),
    wait_for_workers: bool = True,
    multi_tenant: bool = False,
    master_listen_fd: int | None = None,
    use_libuv: bool = True,
) -> None:
    """Signature of TCPStore's constructor."""


_CONNECT = inspect.signature(_connect_arguments)


def _connect(ranks: Ranks, store: TCPStore, *args: Any, **kwargs: Any) -> None:
    """Make a TCPStore. If it waits for others, let them run."""
    original = functools.partial(_originals[TCPStore, "__init__"], store)
    try:
        given = _CONNECT.bind(*args, **kwargs)
    except TypeError:  # torch's own error is better.
        original(*args, **kwargs)
        return
    # Pass only these arguments on, because torch has its own defaults.
    wanted = dict(given.arguments)
    given.apply_defaults()
    host, port = given.arguments["host_name"], given.arguments["port"]
    timeout, is_master = given.arguments["timeout"], given.arguments["is_master"]
    waits, count = ranks.stores, given.arguments["world_size"]
    # With port 0 the host chooses a port, so it has no listener yet.
    if port and not _is_listening(port):
        if waits is not None and not is_master:
            _await_master(waits, host, port, timeout)
        else:
            _joined[port] = 0
    counts = given.arguments["wait_for_workers"] and count is not None and count > 0
    if counts and waits is not None:
        # With a count of 1, torch waits for no other client.
        wanted["world_size"] = 1
    original(**wanted)
    if counts:
        _joined[store.port] = (_joined.get(store.port, 0) if port else 0) + 1
    if waits is None:
        return
    waits.look()
    if counts and is_master:
        _await_clients(waits, store.port, count, timeout)


def _is_listening(port: int) -> bool:
    """Return True if a port of this machine has a listener."""
    # Tries to bind, because a connection would count as a client.
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _await_master(waits: StoreWaits, host: str, port: int, timeout: timedelta) -> None:
    doing = f"waits for a TCPStore to listen at {host}:{port}"
    try:
        waits.until(lambda: _is_listening(port), doing, timeout)
    except TimedOut as error:
        raise connect_timed_out(error, host, port) from None


def _await_clients(waits: StoreWaits, port: int, count: int, timeout: timedelta) -> None:
    doing = f"waits for {count} ranks to connect to its TCPStore at port {port}"
    try:
        waits.until(lambda: _joined[port] >= count, doing, timeout)
    except TimedOut as error:
        raise clients_timed_out(error, _joined[port], count) from None
