"""Supervisor that runs a command in a child process: its exit status and its messages."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zero_sim.host import supervisor

ROOT = str(Path(__file__).parents[1])
BEGIN = """
import os, signal, sys, threading, time
from zero_sim.host import supervisor
supervisor.attach()
def take(number, frame):
    supervisor.confirm(130)
    sys.exit(0)
signal.signal(signal.SIGTERM, take)
supervisor.listen()
"""


@pytest.fixture
def supervise(monkeypatch, capfd, tmp_path):
    """Function that runs code as a supervised command, and returns exit status and messages."""

    def run(code):
        script = tmp_path / "theirs.py"
        script.write_text(BEGIN + textwrap.dedent(code))
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(script)])
        status = supervisor.supervise("theirs:T")
        return status, capfd.readouterr().err

    monkeypatch.setenv("PYTHONPATH", ROOT)
    return run


def test_confirmed_status_is_returned(supervise):
    assert supervise("supervisor.confirm(3)\nos._exit(0)") == (3, "")


@pytest.mark.parametrize(
    "ending", ["sys.exit(0)", "os._exit(0)", "os.execv('/bin/true', ['true'])"]
)
def test_exit_without_confirmation_is_no_success(supervise, ending):
    status, said = supervise(ending)
    assert status == 2
    assert "imported theirs:T ended with exit status 0, after 0 cases. That is no success" in said


def test_message_names_the_case_in_progress(supervise):
    ending = "supervisor.count_case()\nsupervisor.note('case b')\nos._exit(0)"
    assert "exit status 0 at case b, after 1 case." in supervise(ending)[1]


def test_line_that_ends_the_process_is_shown(supervise):
    status, said = supervise(
        """
        def end():
            os._exit(7)
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join()
        """
    )
    assert status == 2
    assert "os._exit(7) was called here:" in said
    assert "in end\n    os._exit(7)\n" in said
    assert "threading.py" not in said


def test_exit_after_confirmation_changes_nothing(supervise):
    code = "import atexit\natexit.register(os._exit, 0)\nsupervisor.confirm(1)"
    assert supervise(code) == (1, "")


def test_forked_process_cannot_confirm(supervise):
    code = "if os.fork() == 0:\n    supervisor.confirm(0)\nos._exit(0)"
    assert supervise(code)[0] == 2


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGSEGV, 2, "signal SIGSEGV"), (signal.SIGKILL, 4, "Something killed it")],
)
def test_ending_signal_is_named(supervise, number, status, words):
    ended, said = supervise(f"os.kill(os.getpid(), {int(number)})")
    assert ended == status
    assert words in said


@pytest.mark.parametrize("where", ["", "del signal.sigtimedwait"])
def test_signal_is_passed_on(tmp_path, where):
    """Run in a child process, because other threads of this one may take the signal."""
    script = tmp_path / "whole.py"
    begin = BEGIN.replace(
        "supervisor.attach()",
        f"{where}\nif not supervisor.attach(): sys.exit(supervisor.supervise('theirs:T'))",
    )
    script.write_text(begin + "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(100)")
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_signal_mask_is_restored(supervise):
    supervise("supervisor.confirm(0)")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGCHLD}


def test_more_notes_than_fit_the_channel_are_accepted(supervise):
    code = "for i in range(1000):\n    supervisor.note('x' * 20)\nsupervisor.confirm(0)"
    assert supervise(code) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        (["run", "x.toml", "--target", "a:B"], "a:B"),
        (["fuzz", "--target=a.b:C", "--cases", "3"], "a.b:C"),
        (["run", "x.toml", "--target", "torch-ddp"], ""),
        (["run", "x:y"], ""),
        (["--target"], ""),
    ],
)
def test_foreign_target_is_found_on_the_command_line(arguments, target):
    assert supervisor.foreign_target(arguments) == target
