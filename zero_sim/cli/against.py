"""`zero-sim torchrun --against`: a script judged by another way to run it."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_sim.cli.parts import FILE, option
from zero_sim.errors import UsageError
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.against.runs import Side
    from zero_sim.script.launch import Settings

RELATIONS = ("1", "resumed", "mesh", "micro")
_ORDER_OF_STATUS = (1, 2, 4, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstOptions:
    """Options of the comparison with another way to run the script."""

    against: str | None = option(
        "--against",
        type=click.Choice(RELATIONS),
        help="Judge the script by another way to run it, in float64: on 1 rank; stopped and "
        "resumed; on another mesh; with other micro-batches.",
    )
    arguments_of_one: str | None = option(
        "--arguments-of-one",
        metavar="ARGS",
        help="The script's arguments in the run to compare with, if they differ.",
    )
    arguments_of_stopped: str | None = option(
        "--arguments-of-stopped",
        metavar="ARGS",
        help="With --against resumed: the script's arguments in the run that stops early.",
    )
    sizes: str | None = option(
        "--sizes", metavar="N,N,...", help="With --against 1: judge these numbers of ranks."
    )
    feed: bool = option(
        "--feed", is_flag=True, help="Deal the rows that one rank read to all ranks."
    )
    start_of_one: bool = option(
        "--start-of-one", is_flag=True, help="Start all ranks with the params of one rank."
    )
    precision: bool = option(
        "--precision",
        is_flag=True,
        help="Compare in the script's own dtypes, too, and warn of what rounding does not explain.",
    )
    json: Path | None = option("--json", type=FILE, help="Write the verdict as JSON.")
    junit: Path | None = option("--junit", type=FILE, help="Write the verdict as JUnit XML.")


def judge_script(
    options: AgainstOptions,
    settings: Settings,
    *,
    seed: int,
    words: Sequence[str],
    allowed_drift: Sequence[str] = (),
) -> int:
    """Judge a script; the exit status.

    Args:
        options: What to compare with, and where reports go.
        settings: The world of the side that is judged.
        seed: Seed of all runs.
        words: The script and its arguments, with `-m` before a module.
        allowed_drift: Patterns of names of tensors that may differ among ranks.
    """
    from zero_sim.against.account import account_of
    from zero_sim.against.precision import measure_precision
    from zero_sim.against.text import as_dict, junit_case, render
    from zero_sim.against.verdict import EXIT_STATUS, judge, prepare
    from zero_sim.report.junit import junit_xml, write_junit

    expected, sides = _sides(options, settings, words=words, allowed_drift=tuple(allowed_drift))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prepared = prepare(expected, seed=seed, keeps_rows=options.feed)
    statuses, reports, cases = [], [], []
    for side in sides:
        begun = time.perf_counter()
        comparison = judge(
            prepared, side, feeds=options.feed, starts_alike=options.start_of_one
        )
        verdict, account = comparison.verdict, account_of(comparison)
        if options.precision and verdict.outcome == "equal":
            report = measure_precision(
                expected,
                side,
                seed=seed,
                feeds=options.feed,
                starts_alike=options.start_of_one,
            )
            verdict = replace(verdict, notes=(*verdict.notes, report.text))
        click.echo(printable(render(verdict, account), lines=True))
        statuses.append(EXIT_STATUS[verdict.outcome])
        reports.append(as_dict(verdict, account, words=words))
        seconds = time.perf_counter() - begun
        cases.append(junit_case(verdict, account, script=shlex.join(words), seconds=seconds))
    if options.json is not None:
        options.json.write_text(json.dumps(reports, indent=2) + "\n")
    if options.junit is not None:
        total = sum(case.seconds for case in cases)
        write_junit(options.junit, junit_xml(cases, seconds=total, started=started))
    sys.stdout.flush()
    return next((status for status in _ORDER_OF_STATUS if status in statuses), 0)


def _sides(
    options: AgainstOptions,
    settings: Settings,
    *,
    words: Sequence[str],
    allowed_drift: tuple[str, ...],
) -> tuple[Side, list[Side]]:
    """The side to compare with, and those that are judged."""
    from zero_sim.against.runs import Side

    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    side = Side(
        settings=settings,
        name=name,
        is_module=is_module,
        arguments=tuple(arguments),
        allowed_drift=allowed_drift,
    )
    other = side
    if options.arguments_of_one is not None:
        other = replace(side, arguments=tuple(shlex.split(options.arguments_of_one)))
    if options.against == "1":
        one = replace(settings, ranks_per_node=1, nodes=1)
        sizes = _sizes(options, settings)
        sides = [
            replace(side, settings=replace(settings, ranks_per_node=size, nodes=1))
            if options.sizes
            else side
            for size in sizes
        ]
        return replace(other, settings=one), sides
    if options.sizes is not None:
        raise UsageError("expected --sizes with --against 1, got it with another relation.")
    if options.against == "resumed":
        if options.arguments_of_stopped is None:
            raise UsageError(
                "expected --arguments-of-stopped with --against resumed, got none. Give the "
                "arguments of the run that stops early; ARGUMENTS are those of the run that "
                "resumes, and --arguments-of-one those of an uninterrupted one."
            )
        stopped = tuple(shlex.split(options.arguments_of_stopped))
        resumed = replace(side, earlier_arguments=stopped, label="a stopped and resumed run")
        return replace(other, label="an uninterrupted run"), [resumed]
    if options.arguments_of_one is None:
        raise UsageError(
            f"expected --arguments-of-one with --against {options.against}, got none. Give the "
            "script's arguments for the other way to run it."
        )
    words_of = {"mesh": "mesh", "micro": "number of micro-batches"}[str(options.against)]
    return replace(other, label=f"another {words_of}"), [side]


def _sizes(options: AgainstOptions, settings: Settings) -> list[int]:
    if options.sizes is None:
        if settings.world_size < 2:
            raise UsageError(
                "expected at least two ranks to compare with one, got 1. Add --nproc-per-node 4."
            )
        return [settings.world_size]
    words = options.sizes.split(",")
    if not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise UsageError(f"expected sizes such as 1,2,4, got {options.sizes!r}.")
    return [int(word) for word in words]
