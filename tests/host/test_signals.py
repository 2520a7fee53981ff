"""Signals that end a command."""

from __future__ import annotations

import signal

from zero_sim.host.signals import FROM_OWNER, interrupt, listening


def test_process_without_owner_ignores_owner_signals() -> None:
    """The signal is for a worker, whose process id may have been reused."""
    before = signal.getsignal(FROM_OWNER)
    with listening(interrupt):
        assert signal.getsignal(FROM_OWNER) == before
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
