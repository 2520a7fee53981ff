"""Stores of torch that a rank makes itself, TCPStore, FileStore and HashStore: their waits.

torch waits for a key in C++, where a simulated rank would keep every other one from setting it.
While a world is open, a rank that waits in such a store lets the others run, and looks again after
each of their writes to any store of torch. What waits is told in the deadlock table, and the
store's own time-out is one in simulated time, as `zero_sim.sim.comm.timeouts` has it. A program
that asks again and again, as by `check` in a loop, lets the others run, too.

Threads that a rank started are none of its world: where no rank can run, but there is such a
thread, it is waited for as long as the time-out says by the clock.
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
"""How often a rank looks whether a thread that is no rank has ended its wait."""

_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_joined: dict[int, int] = {}
"""How many have connected to the store at a port, of those that say how many there will be."""


class StoreWait:
    """A rank's wait for something that a write to a store may bring about."""

    __slots__ = ("doing", "done", "missing", "ready", "waiters")

    def __init__(self, doing: str, ready: Callable[[], bool]) -> None:
        self.doing = doing
        self.ready = ready
        self.done = False
        self.missing: tuple[int, ...] = ()
        self.waiters: list[int] = []


class StoreWaits:
    """All such waits of one world.

    Args:
        wait: Blocks the calling rank, `wait(awaited, site, timeout_seconds)`.
        poll: Lets every rank that can run have its turn, `poll(awaited, site)`.
        wake: Makes the ranks that wait for something ready again.
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
        self._not_of_program = set(threading.enumerate())

    def until(self, ready: Callable[[], bool], doing: str, timeout: timedelta) -> None:
        """Block the calling rank until `ready()`.

        Args:
            ready: Whether there is nothing to wait for any more.
            doing: The wait in words, for the deadlock table.
            timeout: How long that may take, in simulated time.

        Raises:
            TimedOut: It took longer.
        """
        # Who is woken may find that another rank was faster, at a queue for one.
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
        """Let the others run, of a rank that asks for something which is not yet so."""
        self._poll(StoreWait(doing, lambda: False), _site())

    def look(self) -> None:
        """Wake the ranks whose waits are over; to be called after each write."""
        for waited in [each for each in self._waits if each.ready()]:
            self._waits.remove(waited)
            waited.done = True
            self._wake(waited)

    def _await_helpers(self, ready: Callable[[], bool], timeout: timedelta) -> bool:
        """Wait by the clock for threads that ranks have started; whether one has made it ready."""
        end = time.monotonic() + timeout.total_seconds()
        while not ready():
            helpers = set(threading.enumerate()) - self._not_of_program
            if not helpers or time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


class Ranks(Protocol):
    """Where the running thread's waits are found, if it is a rank."""

    stores: StoreWaits | None


def install(ranks: Ranks) -> None:
    """Put these waits in the place of torch's, for threads that are ranks."""
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
        # Not on Store itself: C++ would take that for the method of a store written in Python.
        for owner in (*_WAITING_IN_C, PrefixStore):
            if hasattr(Store, name):  # Not every version of torch has all.
                _replace(owner, name, functools.partial(_call, ranks, name, function))
    _replace(TCPStore, "__init__", functools.partial(_connect, ranks))


def uninstall() -> None:
    """Give torch its own functions back."""
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
    """Call what stands in for a method, in a rank and for a store of torch's; else the method."""
    original = functools.partial(getattr(Store, name), store)
    if ranks.stores is None or not isinstance(_innermost(store), _WAITING_IN_C):
        return original(*args, **kwargs)
    return instead(ranks.stores, original, store, *args, **kwargs)


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _kind(store: Store) -> str:
    return type(_innermost(store)).__name__


def _timeout(store: Store, asked: timedelta | None = None) -> timedelta:
    own: Any = store
    return own.timeout if asked is None else asked


def _ask(name: str, store: Store, *args: Any) -> Any:
    """What torch's own method answers, which must be one that does not wait."""
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
        waits.look()
    else:
        waits.poll(f"asks for counter {key!r} of a {_kind(store)}")
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
    if value == desired_value.encode():
        waits.look()
    else:
        waits.poll(f"wants to exchange {expected_value!r} in key {key!r} of a {_kind(store)}")
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
        waits.until(lambda: bool(_ask("check", store, keys)), doing, timeout)
    except TimedOut as error:
        raise store_timed_out(error, _shown(store, keys)) from None


def _shown(store: Store, keys: Sequence[str]) -> list[str]:
    """Keys as torch's own message has them: a TCPStore has all below a slash."""
    return [f"/{key}" if _kind(store) == "TCPStore" else key for key in keys]


def _named(keys: Sequence[str]) -> str:
    return f"key{'s' if len(keys) > 1 else ''} {', '.join(map(repr, keys))}"


def _get(waits: StoreWaits, original: Callable[..., Any], store: Store, key: str) -> bytes:
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
    # A FileStore has no queues, and says so.
    if block and not isinstance(_innermost(store), FileStore):
        doing = f"waits for queue {key!r} of a {_kind(store)}"
        try:
            waits.until(lambda: _ask("queue_len", store, key) > 0, doing, _timeout(store))
        except TimedOut as error:
            raise store_timed_out(error, _shown(store, [key])) from None
    return original(key, block)


def _queue_len(waits: StoreWaits, original: Callable[..., Any], store: Store, key: str) -> int:
    count = original(key)
    if not count:
        waits.poll(f"asks for the length of queue {key!r}, which is empty,")
    return count


def _check(
    waits: StoreWaits, original: Callable[..., Any], store: Store, keys: Sequence[str]
) -> bool:
    there = original(keys)
    if not there:
        waits.poll(f"asks whether {_named(keys)} of a {_kind(store)} is set")
    return there


def _barrier(
    waits: StoreWaits,
    original: Callable[..., Any],
    store: Store,
    key: str,
    world_size: int,
    timeout: timedelta | None = None,
) -> None:
    # As torch counts: a TCPStore in the key itself, the others in keys beside it.
    counter = key if isinstance(_innermost(store), TCPStore) else f"{key}/num_members"
    _ask("add", store, counter, 1)
    if counter != key and int(_ask("get", store, counter)) >= world_size:
        _ask("set", store, f"{key}/last_member", "1")
    waits.look()
    doing = f"waits in barrier {key!r} of a {_kind(store)}"
    try:
        waits.until(
            lambda: int(_ask("get", store, counter)) >= world_size,
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
    """The arguments of a TCPStore."""


_CONNECT = inspect.signature(_connect_arguments)


def _connect(ranks: Ranks, store: TCPStore, *args: Any, **kwargs: Any) -> None:
    """Make a TCPStore; where it waits for others, let them run."""
    original = functools.partial(_originals[TCPStore, "__init__"], store)
    try:
        given = _CONNECT.bind(*args, **kwargs)
    except TypeError:  # Which torch can tell better.
        original(*args, **kwargs)
        return
    asked = dict(given.arguments)
    given.apply_defaults()
    host, port = given.arguments["host_name"], given.arguments["port"]
    timeout, is_master = given.arguments["timeout"], given.arguments["is_master"]
    waits, count = ranks.stores, given.arguments["world_size"]
    if port and not _is_listening(port):
        if waits is not None and not is_master:
            _await_master(waits, host, port, timeout)
        else:
            _joined[port] = 0
    counts = given.arguments["wait_for_workers"] and count is not None and count > 0
    if counts and waits is not None:
        # torch then counts this one, and waits for no other.
        asked["world_size"] = 1
    original(**asked)
    if counts:
        _joined[store.port] = (_joined.get(store.port, 0) if port else 0) + 1
    if waits is None:
        return
    waits.look()
    if counts and is_master:
        _await_clients(waits, store.port, count, timeout)


def _is_listening(port: int) -> bool:
    """Whether anybody listens at a port of this machine; seen without a connection to it."""
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
