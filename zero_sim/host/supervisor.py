"""Supervisor: a process that runs its own command in another process, and reports its ending.

Foreign code can end the process that imports it, with a status of success, and nothing in that
process can report this. So if a command imports foreign code, the started process does not: it
starts the same command again, and exits with the status that the second process confirms at its
end. A process that ends without confirmation has not succeeded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

from zero_sim.host.frames import show_frames
from zero_sim.host.signals import ENDING
from zero_sim.host.terminal import takes_codes
from zero_sim.untrusted import printable

# As for a usage error, and for a problem of the machine (zero_sim.errors).
EXIT_ENDED = 2
EXIT_KILLED = 4
# Environment variable with the descriptor for messages to the supervisor.
_CHANNEL = "ZERO_SIM_SUPERVISOR"
_WATCHED = (*ENDING, signal.SIGCHLD)
# Interval at which messages are read while nothing ends.
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class _Supervised:
    """This process, if another one supervises it."""

    channel: socket.socket
    pid: int = field(default_factory=os.getpid)

    def tell(self, **what: object) -> None:
        # Forks of the code under test inherit the channel, but must not report anything.
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self.channel.sendall(json.dumps(what).encode() + b"\n")


_supervised: _Supervised | None = None
_cases = 0

# Commands whose arguments may name a user's model, and the form of such a name.
_TAKE_MODELS = ("memory", "traffic")
_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def foreign_target(arguments: Sequence[str]) -> str:
    """Return the foreign code named by a command line; empty if there is none.

    Args:
        arguments: All words after the command's own name.
    """
    if arguments and arguments[0] == "torchrun":
        return next((word for word in arguments if word.endswith(".py")), "the script")
    if arguments and arguments[0] in _TAKE_MODELS:
        return next((word for word in arguments[1:] if _MODEL.fullmatch(word)), "")
    # Own targets are plain names. Foreign ones are `module:name`.
    named = [after for word, after in pairwise(arguments) if word == "--target"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--target=")]
    return next((name for name in named if ":" in name), "")


def supervise(target: str) -> int:
    """Run this process's own command again in another process.

    The other process has the same terminal and streams. Signals that do not reach it are passed on.

    Args:
        target: Foreign code that the command imports.

    Returns:
        The exit status confirmed by the other process; 2 if it ended without confirmation, 4 if
        the machine killed it.
    """
    # Inherited, so that signals wait until the other process listens for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        told, returncode = _run_again()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if told.status is not None:
        return told.status
    # The other process could not clean up.
    _restore_terminal()
    error, status = told.without_confirmation(returncode, target=target)
    print(printable(f"Error: {error}", lines=True), file=sys.stderr, flush=True)  # noqa: T201
    return status


def _run_again() -> tuple[_Told, int]:
    ours, theirs = socket.socketpair()
    # The child's end is closed here at once, so that reads end with the child.
    with ours:
        with theirs:
            child = subprocess.Popen(
                # The interpreter's own options too, such as -X or -W.
                [sys.executable, *sys.orig_argv[1:]],
                pass_fds=[theirs.fileno()],
                env={**os.environ, _CHANNEL: str(theirs.fileno())},
            )
        ours.setblocking(False)
        told = _Told()
        while child.poll() is None:
            came = _wait_for_signal()
            told.read(ours)
            if came in ENDING:
                told.passed_on = True
                child.send_signal(came)
        told.read(ours)
    return told, child.returncode


def _wait_for_signal() -> int | None:
    """Return a signal that the other process may not have received; None after a short wait."""
    if not hasattr(signal, "sigtimedwait"):
        # Some systems do not report the sender. If the other process gets the signal twice in
        # a short time, it counts as one.
        time.sleep(_POLL_SECONDS)
        waiting = signal.sigpending() & set(_WATCHED)
        return signal.sigwait(waiting) if waiting else None
    came = signal.sigtimedwait(_WATCHED, _POLL_SECONDS)
    # The terminal sends to all processes of a command (si_code > 0), others only to this one.
    return came.si_signo if came is not None and came.si_code <= 0 else None


@dataclass(slots=True)
class _Told:
    """Messages of the other process so far."""

    status: int | None = None
    cases: int = 0
    doing: str = ""
    ending: Mapping[str, Any] = field(default_factory=dict)
    """The call that ended the process, if it was observed."""
    passed_on: bool = False
    """True if a signal was passed on to it."""
    unread: bytes = b""

    def read(self, channel: socket.socket) -> None:
        """Read the messages that have arrived."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while part := channel.recv(65536):
                # A message may arrive in parts.
                *lines, self.unread = (self.unread + part).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        self.doing = message.get("doing", self.doing)
        self.cases = message.get("cases", self.cases)
        self.status = message.get("finished", self.status)
        self.ending = message.get("ending", self.ending)

    def without_confirmation(self, returncode: int, *, target: str) -> tuple[str, int]:
        """Return message and exit status for a process that ended without confirmation."""
        number = -returncode
        if self.passed_on and number in ENDING:
            return "interrupted.", 130
        if returncode >= 0:
            how = f"exit status {self.ending.get('status', returncode)}"
        else:
            how = f"signal {signal.Signals(number).name}"
        where = f" at {self.doing}" if self.doing else ""
        count = f"{self.cases} case{'' if self.cases == 1 else 's'}"
        lines = [
            f"expected the command to reach its end, but the process that imported {target} "
            f"ended with {how}{where}, after {count}. That is no success, whatever the status."
        ]
        # No process can catch SIGKILL, so the out-of-memory killer is the likely sender.
        if number == signal.SIGKILL:
            lines.append("Something killed it, as a machine does when its memory is full.")
            return "\n".join(lines), EXIT_KILLED
        if self.ending:
            lines.append(f"{self.ending['call']} was called here:\n{self.ending['frames']}")
        lines.append("Let judged code raise an exception instead of ending the process.")
        return "\n".join(lines), EXIT_ENDED


def _restore_terminal() -> None:
    if takes_codes(sys.stderr):
        # Clear the progress line, and show the cursor again.
        print("\r\x1b[K\x1b[?25h", end="", file=sys.stderr, flush=True)  # noqa: T201


def attach() -> bool:
    """Connect to the process that supervises this one; return False if there is none."""
    global _supervised
    descriptor = os.environ.pop(_CHANNEL, None)
    if descriptor is None:
        return False
    channel = socket.socket(fileno=int(descriptor))
    # Not for processes of the code under test.
    channel.set_inheritable(False)
    _supervised = _Supervised(channel)
    threading.Thread(target=_end_with, args=(channel,), name="supervisor", daemon=True).start()
    # sys.exit raises and can be seen. os._exit ends the process without a trace.
    os._exit = _watched_exit
    return True


def listen() -> None:
    """Unblock signals, once something listens for them."""
    if _supervised is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def note(doing: str) -> None:
    """Report the next action of this process, in words that follow `at`."""
    if _supervised is not None:
        _supervised.tell(doing=doing, cases=_cases)


def count_case() -> None:
    """Count an ended case."""
    global _cases
    _cases += 1


def confirm(status: int) -> None:
    """Confirm the end of the command.

    Args:
        status: Exit status of the command.
    """
    if _supervised is not None:
        _supervised.tell(finished=status, cases=_cases)


def end_process(status: int) -> NoReturn:
    """End this process at once, with the status of a command that reached its end."""
    confirm(status)
    _exit(status)


def _end_with(channel: socket.socket) -> None:
    """End this process with its supervisor, because its results would reach no reader."""
    # The supervisor sends nothing, so this returns only when its end is closed.
    with contextlib.suppress(OSError):
        channel.recv(1)
    _exit(1)


_exit = os._exit


def _watched_exit(status: int) -> NoReturn:
    """Report the caller of `os._exit`, then exit."""
    text = show_frames(traceback.extract_stack()[:-1])
    if _supervised is not None:
        _supervised.tell(ending={"call": f"os._exit({status})", "status": status, "frames": text})
    _exit(status)
