"""Control codes are written to a capable terminal and nowhere else."""

from __future__ import annotations

import io
import sys
import time

import pytest

from zero_sim.cli import session as cli_session
from zero_sim.cli.fuzz import _Progress
from zero_sim.fuzz.totals import CampaignTotals
from zero_sim.host import supervisor

ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """Stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def write_all(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, wait: bool) -> str:
    """Write everything that commands write to a terminal; wait for delayed output if `wait`."""
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(cli_session, "PROGRESS_AFTER_SECONDS", 0.0)
    with cli_session.progress("1 of 2  a case"):
        while wait and not stream.getvalue():
            time.sleep(0.001)
    shown = CampaignTotals()
    fuzzing = _Progress(time.monotonic())
    fuzzing.update(shown)
    fuzzing.clear()
    supervisor._restore_terminal()
    print(cli_session.coloured("PASS  a case", "pass"))  # noqa: T201
    return stream.getvalue()


def test_terminal_gets_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = write_all(monkeypatch, Terminal(), wait=True)
    assert "\r\x1b[K" in text
    assert "a case" in text.partition(ESCAPE)[0] or "1 of 2" in text
    assert f"{ESCAPE}[32m" in text


@pytest.mark.parametrize(
    ("name", "value", "stream"),
    [("NO_COLOR", "1", Terminal), ("TERM", "dumb", Terminal), ("TERM", "xterm", io.StringIO)],
    ids=["NO_COLOR", "dumb", "not a terminal"],
)
def test_other_streams_get_no_control_codes(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, stream: type[io.StringIO]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    assert write_all(monkeypatch, stream(), wait=False) == "PASS  a case\n"


def test_empty_no_color_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert ESCAPE in write_all(monkeypatch, Terminal(), wait=True)
