"""Which signals end a command."""

from __future__ import annotations

import signal

from zero_sim.host.signals import FROM_OWNER, interrupt, listening


def test_what_owners_send_means_nothing_to_a_process_without_one() -> None:
    """It is for a worker, whose id another process may have got since."""
    before = signal.getsignal(FROM_OWNER)
    with listening(interrupt):
        assert signal.getsignal(FROM_OWNER) == before
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
