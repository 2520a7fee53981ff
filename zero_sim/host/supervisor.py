"""A process that runs a command in another one and says how it ended.

Code of somebody else can end the process that imports it, with a status of success, and nothing in
that process can say so. So where a command imports such code, the process that was started does
not: it starts the same command once more, and its exit status is the one that the other process
confirmed when it was through with the command. One that ends without has not succeeded.
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

EXIT_ENDED = 2
EXIT_KILLED = 4
_CHANNEL = "ZERO_SIM_SUPERVISOR"
"""Environment variable with the descriptor over which the other process tells."""
_WATCHED = (*ENDING, signal.SIGCHLD)
_POLL_SECONDS = 0.05
"""How often what is told is read, while nothing ends."""


@dataclass(slots=True)
class _Supervised:
    """This process, where another one supervises it."""

    channel: socket.socket
    pid: int = field(default_factory=os.getpid)

    def tell(self, **what: object) -> None:
        # What the code under test forks has this channel, too, and nothing to tell over it.
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self.channel.sendall(json.dumps(what).encode() + b"\n")


_supervised: _Supervised | None = None
_cases = 0

_TAKE_MODELS = ("memory", "traffic")
_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Commands that may name a model of somebody else, and what such a name looks like."""


def foreign_target(arguments: Sequence[str]) -> str:
    """What a command line names that somebody else wrote; empty where there is nothing.

    Args:
        arguments: All words after the command's own name.
    """
    if arguments and arguments[0] == "torchrun":
        return next((word for word in arguments if word.endswith(".py")), "the script")
    if arguments and arguments[0] in _TAKE_MODELS:
        return next((word for word in arguments[1:] if _MODEL.fullmatch(word)), "")
    named = [after for word, after in pairwise(arguments) if word == "--target"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--target=")]
    return next((name for name in named if ":" in name), "")


def supervise(target: str) -> int:
    """Run this process's own command once more in another process.

    It has the same terminal and streams; signals that do not reach it anyway are passed on.

    Args:
        target: What the command imports.

    Returns:
        The exit status: what the other process confirmed; 2 where it ended without, 4 where the
        machine killed it.
    """
    # What is blocked is inherited: signals wait until the other process listens for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        told, returncode = _run_again()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if told.status is not None:
        return told.status
    _restore_terminal()
    error, status = told.without_confirmation(returncode, target=target)
    print(printable(f"Error: {error}", lines=True), file=sys.stderr, flush=True)  # noqa: T201
    return status


def _run_again() -> tuple[_Told, int]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
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
    """A signal that the other process may not have got, if one comes within a moment."""
    if not hasattr(signal, "sigtimedwait"):
        # Not everywhere does a signal say where it comes from; two that come at once are one.
        time.sleep(_POLL_SECONDS)
        waiting = signal.sigpending() & set(_WATCHED)
        return signal.sigwait(waiting) if waiting else None
    came = signal.sigtimedwait(_WATCHED, _POLL_SECONDS)
    # The terminal sends to all processes of a command, everybody else to this one.
    return came.si_signo if came is not None and came.si_code <= 0 else None


@dataclass(slots=True)
class _Told:
    """What the other process has told so far."""

    status: int | None = None
    cases: int = 0
    doing: str = ""
    ending: Mapping[str, Any] = field(default_factory=dict)
    """The call that ended the process, where it was one that can be seen."""
    passed_on: bool = False
    """Whether it was sent a signal that ends it."""
    unread: bytes = b""

    def read(self, channel: socket.socket) -> None:
        """Take in what has come."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while part := channel.recv(65536):
                *lines, self.unread = (self.unread + part).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        self.doing = message.get("doing", self.doing)
        self.cases = message.get("cases", self.cases)
        self.status = message.get("finished", self.status)
        self.ending = message.get("ending", self.ending)

    def without_confirmation(self, returncode: int, *, target: str) -> tuple[str, int]:
        """What to say of a process that ended before it was through, and the exit status."""
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
            f"expected the command to come to its end, but the process that imported {target} "
            f"ended with {how}{where}, after {count}. That is no success, whatever the status."
        ]
        if number == signal.SIGKILL:
            lines.append("Something killed it; a machine does that when its memory is full.")
            return "\n".join(lines), EXIT_KILLED
        if self.ending:
            lines.append(f"{self.ending['call']} was called here:\n{self.ending['frames']}")
        lines.append("Code that is judged has to raise, not to end the process.")
        return "\n".join(lines), EXIT_ENDED


def _restore_terminal() -> None:
    if takes_codes(sys.stderr):
        # The line of progress, and the cursor that it hid.
        print("\r\x1b[K\x1b[?25h", end="", file=sys.stderr, flush=True)  # noqa: T201


def attach() -> bool:
    """Begin to tell the process that supervises this one; whether one does."""
    global _supervised
    descriptor = os.environ.pop(_CHANNEL, None)
    if descriptor is None:
        return False
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    _supervised = _Supervised(channel)
    threading.Thread(target=_end_with, args=(channel,), name="supervisor", daemon=True).start()
    os._exit = _watched_exit
    return True


def listen() -> None:
    """Let signals come that were held back until somebody listens."""
    if _supervised is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def note(doing: str) -> None:
    """Say what the process is about to do, in words that follow `at`."""
    if _supervised is not None:
        _supervised.tell(doing=doing, cases=_cases)


def count_case() -> None:
    """Say that one more case has ended."""
    global _cases
    _cases += 1


def confirm(status: int) -> None:
    """Say that the command came to its end.

    Args:
        status: Its exit status.
    """
    if _supervised is not None:
        _supervised.tell(finished=status, cases=_cases)


def end_process(status: int) -> NoReturn:
    """End this process at once, with the status of a command that came to its end."""
    confirm(status)
    _exit(status)


def _end_with(channel: socket.socket) -> None:
    """End this process with the one that supervises it: nobody else is left to hear of it."""
    with contextlib.suppress(OSError):
        channel.recv(1)
    _exit(1)


_exit = os._exit


def _watched_exit(status: int) -> NoReturn:
    """`os._exit`, which says first who calls it."""
    text = show_frames(traceback.extract_stack()[:-1])
    if _supervised is not None:
        _supervised.tell(ending={"call": f"os._exit({status})", "status": status, "frames": text})
    _exit(status)
