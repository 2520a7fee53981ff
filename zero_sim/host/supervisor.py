"""Supervisor: a process that runs its own command in a second process, and reports how that ended.

Foreign code can end the process that imports it with status 0, and nothing in that process can
report this. So if a command imports foreign code, it runs in a second process. The first process
starts the same command again, and exits with the status that the second confirms at its end. If
the second process ends without confirmation, the command has failed.
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

# Same as for UsageError and EnvironmentProblem in zero_sim.errors.
EXIT_ENDED = 2
EXIT_KILLED = 4
# Environment variable with the descriptor for messages to the supervisor.
_CHANNEL = "ZERO_SIM_SUPERVISOR"
_WATCHED = (*ENDING, signal.SIGCHLD)
# Interval between reads of messages.
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class _Supervised:
    """This process's connection to its supervisor."""

    channel: socket.socket
    pid: int = field(default_factory=os.getpid)

    def report(self, **what: object) -> None:
        # If the code under test forks, the fork inherits the channel but must not report anything.
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self.channel.sendall(json.dumps(what).encode() + b"\n")


_supervised: _Supervised | None = None
_cases = 0

# Commands whose arguments may name a user's model, and the pattern of such a name.
_TAKE_MODELS = ("memory", "traffic")
_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def foreign_target(arguments: Sequence[str]) -> str:
    """Return the name of foreign code in a command line; empty if there is none."""
    if arguments and arguments[0] == "torchrun":
        return next((word for word in arguments if word.endswith(".py")), "the script")
    if arguments and arguments[0] in _TAKE_MODELS:
        return next((word for word in arguments[1:] if _MODEL.fullmatch(word)), "")
    # Built-in targets are plain names. Foreign targets are `module:name`.
    named = [after for word, after in pairwise(arguments) if word == "--target"]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--target=")]
    return next((name for name in named if ":" in name), "")


def supervise(target: str) -> int:
    """Run this process's command again in a second process.

    The second process has the same terminal and streams. Signals that do not reach it are passed
    on.

    Returns:
        The exit status that the second process confirmed; 2 if it ended without confirmation, 4 if
        it was killed.
    """
    # The second process inherits the mask, so signals wait until it listens for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        report, returncode = _run_again()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if report.status is not None:
        return report.status
    # The second process could not clean up.
    _restore_terminal()
    error, status = report.without_confirmation(returncode, target=target)
    print(printable(f"Error: {error}", lines=True), file=sys.stderr, flush=True)  # noqa: T201
    return status


def _run_again() -> tuple[_Report, int]:
    ours, theirs = socket.socketpair()
    # Close the child's end here at once, so reads end when the child ends.
    with ours:
        with theirs:
            child = subprocess.Popen(
                # With the interpreter's options, such as -X or -W.
                [sys.executable, *sys.orig_argv[1:]],
                pass_fds=[theirs.fileno()],
                env={**os.environ, _CHANNEL: str(theirs.fileno())},
            )
        ours.setblocking(False)
        report = _Report()
        while child.poll() is None:
            came = _wait_for_signal()
            report.read(ours)
            if came in ENDING:
                report.passed_on = True
                child.send_signal(came)
        report.read(ours)
    return report, child.returncode


def _wait_for_signal() -> int | None:
    """Return a signal that the second process may not have received; None after a short wait."""
    if not hasattr(signal, "sigtimedwait"):
        # Some systems do not report the sender. If the second process gets the signal twice, it
        # ignores the repeat (`signals.SAME_SECONDS`).
        time.sleep(_POLL_SECONDS)
        waiting = signal.sigpending() & set(_WATCHED)
        return signal.sigwait(waiting) if waiting else None
    came = signal.sigtimedwait(_WATCHED, _POLL_SECONDS)
    # A terminal signals all processes of a command (si_code > 0), other senders only this process.
    return came.si_signo if came is not None and came.si_code <= 0 else None


@dataclass(slots=True)
class _Report:
    """Messages from the second process so far."""

    status: int | None = None
    cases: int = 0
    doing: str = ""
    ending: Mapping[str, Any] = field(default_factory=dict)
    """The call that ended the process; empty if not observed."""
    passed_on: bool = False
    """True if a signal was passed on to the process."""
    unread: bytes = b""

    def read(self, channel: socket.socket) -> None:
        """Read new messages."""
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
        """Return message and exit status for an end without confirmation."""
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
        # The out-of-memory killer is the likely sender.
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
    """Connect to this process's supervisor. Return False if there is none."""
    global _supervised
    descriptor = os.environ.pop(_CHANNEL, None)
    if descriptor is None:
        return False
    channel = socket.socket(fileno=int(descriptor))
    # Processes that the code under test starts must not report anything.
    channel.set_inheritable(False)
    _supervised = _Supervised(channel)
    threading.Thread(target=_end_with, args=(channel,), name="supervisor", daemon=True).start()
    # sys.exit raises an exception, but os._exit ends the process without a trace.
    os._exit = _watched_exit
    return True


def listen() -> None:
    """Unblock signals, once something listens for them."""
    if _supervised is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)


def note(doing: str) -> None:
    """Report this process's next action, in words that follow `at`."""
    if _supervised is not None:
        _supervised.report(doing=doing, cases=_cases)


def count_case() -> None:
    """Count an ended case."""
    global _cases
    _cases += 1


def confirm(status: int) -> None:
    """Confirm that the command reached its end, with its exit status."""
    if _supervised is not None:
        _supervised.report(finished=status, cases=_cases)


def end_process(status: int) -> NoReturn:
    """End this process at once, with the status of a command that reached its end."""
    confirm(status)
    _exit(status)


def _end_with(channel: socket.socket) -> None:
    """End this process when its supervisor ends, because no reader is left for its results."""
    # The supervisor sends nothing, so this returns only when the supervisor's end is closed.
    with contextlib.suppress(OSError):
        channel.recv(1)
    _exit(1)


_exit = os._exit


def _watched_exit(status: int) -> NoReturn:
    """Report the caller of `os._exit`, then exit."""
    text = show_frames(traceback.extract_stack()[:-1])
    if _supervised is not None:
        _supervised.report(ending={"call": f"os._exit({status})", "status": status, "frames": text})
    _exit(status)
