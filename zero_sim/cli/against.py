"""`zero-sim torchrun --against`: compare a script with another run of itself."""

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

from zero_sim.cli.parts import FILE, FOLDER, option
from zero_sim.cli.repeat import world_words
from zero_sim.errors import UsageError
from zero_sim.host.files import unwritten, write_whole
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.against.records import AgainstVerdict
    from zero_sim.against.runs import Side
    from zero_sim.against.text import Reported
    from zero_sim.against.verdict import Prepared
    from zero_sim.script.launch import Settings

RELATIONS = ("1", "resumed", "mesh", "micro")
# With several world sizes, the command exits with the gravest status.
_ORDER_OF_STATUS = (1, 2, 4, 3)
# Raised after the run if the script starts its ranks itself, because only then is their number
# known.
_TOO_FEW_RANKS = (
    "expected at least two ranks to compare with one, got 1. Add --nproc-per-node 4. If the script "
    "starts its ranks itself, put their number into ARGUMENTS, and 1 into --arguments-of-one."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstOptions:
    """Options for comparing a script with another run."""

    against: str | None = option(
        "--against",
        type=click.Choice(RELATIONS),
        help="Compare the script with another run of itself, in float64: on 1 rank, stopped and "
        "resumed, on another mesh, or with other micro-batches.",
    )
    arguments_of_one: str | None = option(
        "--arguments-of-one",
        metavar="ARGS",
        help="Script arguments in the other run, if they differ.",
    )
    arguments_of_stopped: str | None = option(
        "--arguments-of-stopped",
        metavar="ARGS",
        help="With --against resumed: script arguments in the run that stops early.",
    )
    sizes: str | None = option(
        "--sizes", metavar="N,N,...", help="With --against 1: compare each of these world sizes."
    )
    feed: bool = option(
        "--feed", is_flag=True, help="Split the rows that the run on 1 rank read among all ranks."
    )
    all_read_all: bool = option(
        "--all-read-all",
        is_flag=True,
        help="Expect each rank to read all rows, as with tensor parallelism.",
    )
    start_of_one: bool = option(
        "--start-of-one", is_flag=True, help="Start all ranks with the params of the run on 1 rank."
    )
    precision: bool = option(
        "--precision",
        is_flag=True,
        help="Also compare in the script's own dtypes, and warn about differences that rounding "
        "does not explain.",
    )
    json: Path | None = option("--json", type=FILE, help="Write the verdicts as JSON.")
    junit: Path | None = option("--junit", type=FILE, help="Write the verdicts as JUnit XML.")
    html: Path | None = option("--html", type=FILE, help="Write the verdicts as an HTML page.")
    bundles: Path | None = option(
        "--bundles",
        type=FOLDER,
        metavar="DIR",
        help="Unless the runs are equal, write a bundle of the script for `zero-sim replay`.",
    )


def judge_script(
    options: AgainstOptions,
    settings: Settings,
    *,
    seed: int,
    words: Sequence[str],
    allowed_drift: Sequence[str] = (),
) -> int:
    """Compare a script with its other run and return the exit status.

    Args:
        options: The comparison and its report files.
        settings: World of the judged run.
        seed: Seed of all runs.
        words: Script and arguments, with `-m` before a module.
        allowed_drift: Name patterns of tensors that may differ among ranks.
    """
    from zero_sim.against.account import account_of
    from zero_sim.against.precision import measure_precision
    from zero_sim.against.records import EXIT_STATUS
    from zero_sim.against.text import Reported, render
    from zero_sim.against.verdict import judge, prepare

    expected, sides = _sides(options, settings, words=words, allowed_drift=tuple(allowed_drift))
    by_rank = options.against == "resumed"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prepared = prepare(expected, seed=seed, keeps_rows=options.feed, by_rank=by_rank)
    reported: list[Reported] = []
    for side in sides:
        begun = time.perf_counter()
        comparison = judge(
            prepared,
            side,
            feeds=options.feed,
            starts_alike=options.start_of_one,
            all_read_all=options.all_read_all,
        )
        was_run = comparison.measurement is not None
        if was_run and options.against == "1" and comparison.side.world_size < 2:
            raise UsageError(_TOO_FEW_RANKS)
        verdict, account = comparison.verdict, account_of(comparison)
        if options.precision and verdict.outcome == "equal":
            report = measure_precision(
                expected,
                side,
                seed=seed,
                feeds=options.feed,
                splits=comparison.way is not None and comparison.way.splits,
                starts_alike=options.start_of_one,
            )
            verdict = replace(verdict, notes=(*verdict.notes, report.text))
        click.echo(printable(render(verdict, account), lines=True))
        bundle = None
        if options.bundles is not None and verdict.outcome != "equal":
            bundle = _write_bundle(options, prepared, side, verdict, by_rank=by_rank)
            again = ["zero-sim", "replay", "--bundles", str(options.bundles), bundle, "--trust"]
            click.echo(f"  replay: {shlex.join(again)}")
        seconds = time.perf_counter() - begun
        command = _command(options, side, seed=seed, words=words)
        if verdict.outcome != "equal":
            click.echo(f"  repeat: {command}")
        reported.append(
            Reported(
                verdict=verdict, account=account, command=command, seconds=seconds, bundle=bundle
            )
        )
    _write_reports(options, reported, started=started)
    sys.stdout.flush()
    statuses = [EXIT_STATUS[each.verdict.outcome] for each in reported]
    return next((status for status in _ORDER_OF_STATUS if status in statuses), 0)


def _write_reports(options: AgainstOptions, reported: Sequence[Reported], *, started: str) -> None:
    from zero_sim.against.page import write_against_page
    from zero_sim.against.text import as_dict, junit_case
    from zero_sim.report.junit import junit_xml, write_junit
    from zero_sim.report.schemas import versioned

    if options.json is not None:
        verdicts = versioned({"verdicts": [as_dict(each) for each in reported]})
        try:
            write_whole(options.json, (json.dumps(verdicts, indent=2) + "\n").encode())
        except OSError as error:
            raise unwritten("JSON", options.json, error) from None
    if options.junit is not None:
        seconds = sum(each.seconds for each in reported)
        cases = [junit_case(each) for each in reported]
        write_junit(options.junit, junit_xml(cases, seconds=seconds, started=started))
    if options.html is not None:
        write_against_page(options.html, reported)


def _command(options: AgainstOptions, side: Side, *, seed: int, words: Sequence[str]) -> str:
    """Return the command that judges a side again."""
    settings = side.settings
    given = ["--against", str(options.against)]
    given += world_words(settings, allowed_drift=side.allowed_drift)
    # The defaults of a single run.
    given += ["--timing", settings.timing] if settings.timing != "eager" else []
    given += ["--schedule", settings.schedule] if settings.schedule != "round-robin" else []
    given += ["--races"] if settings.races else []
    given += ["--seed", str(seed)] if seed else []
    for flag, value in (
        ("--arguments-of-one", options.arguments_of_one),
        ("--arguments-of-stopped", options.arguments_of_stopped),
    ):
        given += [] if value is None else [flag, value]
    given += ["--feed"] if options.feed else []
    given += ["--all-read-all"] if options.all_read_all else []
    given += ["--start-of-one"] if options.start_of_one else []
    return shlex.join(["zero-sim", "torchrun", *given, *words])


def _write_bundle(
    options: AgainstOptions,
    prepared: Prepared,
    side: Side,
    verdict: AgainstVerdict,
    *,
    by_rank: bool,
) -> str:
    from zero_sim.against.bundles import ScriptBundle, write_script_bundle

    bundle = ScriptBundle(
        expected=prepared.side,
        got=side,
        seed=prepared.seed,
        by_rank=by_rank,
        feeds=options.feed,
        starts_alike=options.start_of_one,
        all_read_all=options.all_read_all,
        outcome=verdict.outcome,
        reason=verdict.reason,
        first=verdict.first,
    )
    assert options.bundles is not None
    return write_script_bundle(bundle, folder=options.bundles).name


def script_bundle(name: str, *, folder: Path) -> Path | None:
    """Return the folder of a script bundle; None if no script bundle has this name."""
    # Look at file names first, because bundles of cases must not pay for the imports below.
    if not any(Path(name).glob("script.json")) and not any(folder.glob("*/script.json")):
        return None
    from zero_sim.against.bundles import find_script_bundle

    return find_script_bundle(name, folder=folder)


def replay_script(path: Path, *, trust: bool) -> int:
    """Judge the script in a bundle again and return the exit status.

    Args:
        path: Folder of the bundle.
        trust: True if the script may run.

    Raises:
        UsageError: `trust` is False.
    """
    from zero_sim.against.account import account_of
    from zero_sim.against.bundles import CODE_FOLDER, read_script_bundle
    from zero_sim.against.records import EXIT_STATUS
    from zero_sim.against.text import render
    from zero_sim.against.verdict import judge, prepare
    from zero_sim.host.working_folder import in_copy_of

    bundle = read_script_bundle(path)
    # Read the bundle first, so that its errors are reported even without --trust.
    if not trust:
        raise UsageError(
            f"expected --trust, because replay runs the code of this bundle. Read "
            f"{path / CODE_FOLDER}, then add --trust."
        )
    # A copy, because the script may write files, which must not change the bundle. An absolute
    # path, because the copy becomes the working folder.
    with in_copy_of(path.absolute() / CODE_FOLDER):
        prepared = prepare(
            bundle.expected, seed=bundle.seed, keeps_rows=bundle.feeds, by_rank=bundle.by_rank
        )
        comparison = judge(
            prepared,
            bundle.got,
            feeds=bundle.feeds,
            starts_alike=bundle.starts_alike,
            all_read_all=bundle.all_read_all,
        )
        verdict = comparison.verdict
        text = render(verdict, account_of(comparison))
    # The bundle's failure is reproduced if outcome and first difference are the same.
    if verdict.outcome == "equal":
        head = "FIXED"
    elif (verdict.outcome, verdict.first) == (bundle.outcome, bundle.first):
        head = "FAILED as in the bundle"
    else:
        then = bundle.first or bundle.reason
        head = f"FAILED, but not as in the bundle, which had {bundle.outcome}: {then}"
    click.echo(printable(f"{head}\n{text}", lines=True))
    return EXIT_STATUS[verdict.outcome]


def _sides(
    options: AgainstOptions,
    settings: Settings,
    *,
    words: Sequence[str],
    allowed_drift: tuple[str, ...],
) -> tuple[Side, list[Side]]:
    """Return the expected side and the sides to judge."""
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
    # The other run has the same script. Only world and arguments may differ.
    other = side
    if options.arguments_of_one is not None:
        # All arguments are in a single option, quoted as in a shell.
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
        # A script may refuse to run on one GPU. Then the run on one rank is repeated with as many
        # GPUs as the largest run has.
        spare = max(each.settings.ranks_per_node for each in sides)
        return replace(other, settings=one, spare_gpus=spare), sides
    if options.sizes is not None:
        raise UsageError(
            "expected --sizes with --against 1, got it with another relation. Remove --sizes."
        )
    if options.against == "resumed":
        if options.arguments_of_stopped is None:
            raise UsageError(
                "expected --arguments-of-stopped with --against resumed, got none. Give three sets "
                "of arguments: --arguments-of-stopped for the run that stops early, ARGUMENTS for "
                "the run that resumes, --arguments-of-one for an uninterrupted run."
            )
        stopped = tuple(shlex.split(options.arguments_of_stopped))
        resumed = replace(side, earlier_arguments=stopped, label="a stopped and resumed run")
        return replace(other, label="an uninterrupted run"), [resumed]
    if options.arguments_of_one is None:
        raise UsageError(
            f"expected --arguments-of-one with --against {options.against}, got none. Give the "
            "script's arguments in the other run."
        )
    words_of = {"mesh": "mesh", "micro": "number of micro-batches"}[str(options.against)]
    return replace(other, label=f"another {words_of}"), [side]


def _sizes(options: AgainstOptions, settings: Settings) -> list[int]:
    if options.sizes is None:
        # A script with its own arguments for one rank may start its ranks itself.
        if settings.world_size < 2 and options.arguments_of_one is None:
            raise UsageError(_TOO_FEW_RANKS)
        return [settings.world_size]
    words = options.sizes.split(",")
    if not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise UsageError(f"expected sizes such as 1,2,4, got {options.sizes!r}.")
    return [int(word) for word in words]
