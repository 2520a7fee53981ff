"""Judges of cases: one after another, or several at once; of the simulated world or of real ranks.

Here whoever has cases, the command line or a pytest session, meets what runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from zero_sim.run.pool import Chosen, JobsJudge, Judge, open_worlds
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import Setup
from zero_sim.scenario.spec import Scenario


@contextlib.contextmanager
def open_judge(
    *,
    backend: Literal["sim", "gloo", "nccl"],
    keep_logs: bool = False,
    device: str = "cpu",
    target: str | None = None,
) -> Iterator[Judge]:
    """What judges one case after another.

    Worlds are kept from case to case, so that setting one up is paid for once.

    Args:
        backend: What carries the collectives.
        keep_logs: Whether results carry their event logs even if nothing fails.
        device: Where simulated ranks and the reference compute, `cpu` or `cuda`.
        target: The system to judge in place of the scenarios' own: a registered name, or
            `module:name`, whose code is run.

    Raises:
        UsageError: There is no such target.
    """
    if backend != "sim":
        with on_workers(Setup(backend=backend)) as judge:
            yield judge
        return
    with open_worlds(Chosen(keep_logs=keep_logs, device=device, target=target)) as judge:
        yield judge


def open_jobs(
    scenarios: Sequence[Scenario],
    *,
    jobs: int,
    keep_logs: bool = False,
    device: str = "cpu",
    target: str | None = None,
) -> AbstractContextManager[Judge]:
    """What judges cases several at a time, and tells of them one after another.

    Args:
        scenarios: The cases, in the order in which they will be asked for.
        jobs: Number of processes.
        keep_logs: As for `open_judge`, like all that follows.
        device: As there.
        target: As there.

    Raises:
        UsageError: There is no such target.
    """
    chosen = Chosen(keep_logs=keep_logs, device=device, target=target)
    return JobsJudge(scenarios, jobs=jobs, chosen=chosen)
