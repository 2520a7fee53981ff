"""Commands that repeat the runs of a script, for the last line of a report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_sim.script.settings import Settings


def world_words(settings: Settings, *, allowed_drift: Sequence[str] = ()) -> list[str]:
    """Return the options of `zero-sim torchrun` that differ from their defaults.

    Args:
        settings: The world's settings. Schedule, timing and races are omitted, because their
            defaults depend on the number of runs.
        allowed_drift: Names of tensors that may differ among ranks.
    """
    from zero_sim.script.launch import Settings

    usual = Settings(ranks_per_node=1)
    words = ["--nproc-per-node", str(settings.ranks_per_node)]
    for flag, name in (
        ("--nnodes", "nodes"),
        ("--order", "order"),
        ("--depth", "depth"),
        ("--stall-seconds", "stall_seconds"),
        ("--master-addr", "address"),
        ("--master-port", "port"),
    ):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            words += [flag, str(value)]
    flags = (("--no-strict", not settings.strict), ("--cuda-is-cpu", settings.cuda_is_cpu))
    words += [flag for flag, given in flags if given]
    for package in settings.packages:
        words += ["--own-modules", package]
    for name in allowed_drift:
        words += ["--allow-drift", name]
    return words


def repeat_command(
    settings: Settings,
    seeds: Sequence[int],
    *,
    words: Sequence[str],
    ignored: re.Pattern[str] | None = None,
    allowed_drift: Sequence[str] = (),
) -> str:
    """Return the command that repeats a script's runs.

    Args:
        settings: The world's settings.
        seeds: A seed per run.
        words: Script and arguments.
        ignored: Pattern for lines that are not compared.
        allowed_drift: As for `world_words`.
    """
    options = world_words(settings, allowed_drift=allowed_drift)
    options += ["--timing", settings.timing, "--schedule", settings.schedule]
    # The default of --races is True for several runs.
    if settings.races != (len(seeds) > 1):
        options += ["--races" if settings.races else "--no-races"]
    if settings.shown is not None:
        options += ["--output-of", ",".join(map(str, sorted(settings.shown)))]
    if ignored is not None:
        options += ["--ignore", ignored.pattern]
    if len(seeds) == 1:
        options += ["--seed", str(seeds[0])]
    else:
        # Only the two seeds whose runs differ: --runs would repeat all runs between them.
        options += ["--seeds", ",".join(map(str, seeds))]
    return shlex.join(["zero-sim", "torchrun", *options, *words])
