"""The command `zero-sim torchrun`: run an unmodified script on simulated ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from zero_sim.cli.against import AgainstOptions, judge_script
from zero_sim.cli.parts import STALL_SECONDS, option, require_with, takes
from zero_sim.cli.repeat import repeat_command
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.against.watch import ScriptWatch
    from zero_sim.script.launch import Settings
    from zero_sim.script.record import ScriptRun

EXIT_FOUND = 1
GPUS_OF_A_NODE = 2
"""Number of GPUs for `--nproc-per-node gpu` on a machine without GPUs."""
_COUNT: dict[str, Any] = {"type": click.IntRange(min=1), "show_default": True}
# torchrun's options for starting and connecting processes are accepted without effect.
_IGNORED = (
    "log-dir",
    "max-restarts",
    "monitor-interval",
    "node-rank",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "role",
    "start-method",
)


def _spelled(*names: str) -> list[str]:
    """Return options with hyphens and with underscores, because torchrun accepts both."""
    return [f"--{each}" for name in names for each in dict.fromkeys((name, name.replace("-", "_")))]


class _Numbers(click.ParamType):
    name = "N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        # int() would also accept signs, blanks, underscores and non-ASCII digits.
        if not all(word.isascii() and word.isdecimal() for word in words):
            self.fail(f"expected numbers such as 0,3; got {value!r}", param, ctx)
        return tuple(map(int, words))


class _RanksPerNode(click.ParamType):
    """A number of ranks, or torchrun's `auto`, `cpu` or `gpu`."""

    name = "N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value)
        if text in ("auto", "cpu", "gpu"):
            return _count_devices(text)
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            self.fail(f"expected a positive number, auto, gpu or cpu; got {text!r}", param, ctx)
        return int(text)


def _count_devices(kind: str) -> int:
    """Return the number of devices; `auto` counts GPUs if there are any, else CPUs."""
    with packages_needed():
        import torch
    gpus = 0 if kind == "cpu" else torch.cuda.device_count()
    if kind == "gpu" and not gpus:
        _print(f"Note: --nproc-per-node gpu: no GPU found, so {GPUS_OF_A_NODE} are simulated.")
        return GPUS_OF_A_NODE
    return gpus or os.cpu_count() or 1


class _Pattern(click.ParamType):
    name = "regex"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[str]:
        try:
            return re.compile(str(value))
        except re.error as error:
            self.fail(f"expected a regular expression, got {value!r}: {error}", param, ctx)


@dataclass(frozen=True, kw_only=True, slots=True)
class _WorldOptions:
    """Options of the simulated world. `Settings` has fields of the same names."""

    ranks_per_node: int = option(
        *_spelled("nproc-per-node"),
        type=_RanksPerNode(),
        default=1,
        show_default=True,
        metavar="N|auto|gpu|cpu",
        help="Ranks per node.",
    )
    nodes: int = option("--nnodes", **_COUNT, default=1, metavar="N", help="Nodes.")
    order: str = option(
        "--order", default="linear", show_default=True, help="Summation order of reductions."
    )
    schedule: str | None = option(
        "--schedule",
        type=click.Choice(["round-robin", "random", "pct"]),
        help="Choice of the next rank to run.  [default: round-robin; random for several runs]",
    )
    timing: str | None = option(
        "--timing",
        type=click.Choice(["eager", "lazy", "hostile"]),
        help="When collectives read inputs and write outputs.  [default: eager; hostile for "
        "several runs]",
    )
    depth: int = option("--depth", **_COUNT, default=3, hidden=True)
    races: bool | None = option(
        "--races/--no-races",
        default=None,
        help="Check every operation for uses of memory in flight.  [default: --races for several "
        "runs]",
    )
    no_strict: bool = option(
        "--no-strict", is_flag=True, help="Accept calls that gloo accepts and NCCL refuses."
    )
    packages: tuple[str, ...] = option(
        "--own-modules",
        multiple=True,
        metavar="PACKAGE",
        help="Import this package once per rank, like modules in the script's folder, so that "
        "ranks do not share its globals. Repeatable.",
    )
    cuda_is_cpu: bool = option(
        "--cuda-is-cpu",
        is_flag=True,
        help="Treat cuda devices as the CPU from the start. By default, only after the script "
        "failed without a GPU.",
    )
    shown: tuple[int, ...] | None = option(
        "--output-of", type=_Numbers(), help="Show only the output of these ranks."
    )
    stall_seconds: float = option(
        "--stall-seconds",
        **STALL_SECONDS,
        default=300.0,
        show_default=True,
        metavar="S",
        help="Longest time between two torch.distributed calls.",
    )
    address: str = option(*_spelled("master-addr"), default="localhost", hidden=True)
    # torchrun's default port; scripts read it from MASTER_PORT.
    port: int = option(*_spelled("master-port"), type=int, default=29500, hidden=True)

    def settings(self, *, several: bool) -> Settings:
        """Return the world's settings.

        Args:
            several: True if several runs are compared.
        """
        from zero_sim.script.launch import Settings

        # `Settings` has the opposite field, `strict`.
        names = [each.name for each in fields(self) if each.name != "no_strict"]
        given = {name: getattr(self, name) for name in names}
        return Settings(
            **given
            | {
                "schedule": self.schedule or ("random" if several else "round-robin"),
                "timing": self.timing or ("hostile" if several else "eager"),
                "races": several if self.races is None else self.races,
                "strict": not self.no_strict,
                "shown": None if self.shown is None else frozenset(self.shown),
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunOptions:
    """Options for the runs and their comparison."""

    seed: int = option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Seed of the schedule, the timing and the script's random numbers.",
    )
    runs: int = option(
        "--runs",
        **_COUNT,
        default=1,
        metavar="N",
        help="Run with N seeds, starting at --seed, and compare each run with the first: outcome, "
        "output of rank 0, and values at zero_sim.checkpoint_here. Stop at the first difference.",
    )
    seeds: tuple[int, ...] | None = option("--seeds", type=_Numbers(), help="Run with these seeds.")
    allow_drift: tuple[str, ...] = option(
        "--allow-drift",
        multiple=True,
        metavar="NAME",
        help="Allow tensors with this name to differ among ranks; * matches any part.",
    )
    ignore: re.Pattern[str] | None = option(
        "--ignore",
        type=_Pattern(),
        metavar="REGEX",
        help="Do not compare output lines that match, such as times.",
    )


@click.command(
    # Options after SCRIPT belong to the script, as with torchrun.
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@takes(_WorldOptions, "world")
@takes(_RunOptions, "runs")
@takes(AgainstOptions, "relation")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name.")
@click.option("--standalone", is_flag=True, hidden=True, expose_value=False)
@click.option(*_spelled(*_IGNORED), "ignored", multiple=True, hidden=True, expose_value=False)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def torchrun(
    ctx: click.Context,
    world: _WorldOptions,
    runs: _RunOptions,
    relation: AgainstOptions,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run an unmodified script on simulated ranks, as torchrun would.

    All ranks run in one process. Each rank has its own environment, arguments, random numbers and
    copies of the modules in the script's folder. Files are shared, so a run sees files of earlier
    runs.

    Exit status: 0 every rank finished; 1 a rank failed, or there was a deadlock, a race, a contract
    violation or a difference between runs; 2 the usage is wrong, or the script ended the process.

    With --against, the script is compared with another run of itself: 0 equal up to rounding; 1
    different, or only this run fails; 2 the other run fails; 3 inconclusive; 4 unsupported.

    \b
    Examples:
      zero-sim torchrun --nproc-per-node 4 train.py --lr 0.1
      zero-sim torchrun --nproc-per-node 2 --runs 20 train.py
      zero-sim torchrun --nproc-per-node 2 --against 1 train.py
    """
    if runs.seeds is not None and runs.runs != 1:
        raise UsageError("expected --runs or --seeds, got both. Remove one of them.")
    seeds = runs.seeds or tuple(range(runs.seed, runs.seed + runs.runs))
    several = len(seeds) > 1
    require_with(ctx, "--runs or --seeds", "ignore", given=several)
    with packages_needed():
        settings = world.settings(several=several)
    words = (*(["-m"] if module else []), script, *arguments)
    dependent = [each.name for each in fields(AgainstOptions) if each.name != "against"]
    require_with(ctx, "--against", *dependent, given=relation.against is not None)
    if "--against" in arguments:
        raise UsageError(
            "expected options of zero-sim before the script, got --against after it, which makes "
            f"it an argument of {script}. Move it before the script."
        )
    if relation.against is not None:
        if several:
            raise UsageError("expected --against or several runs, got both. Remove one of them.")
        status = judge_script(
            relation, settings, seed=seeds[0], words=words, allowed_drift=runs.allow_drift
        )
        ctx.exit(status)
    ctx.exit(_run(settings, seeds, words=words, runs=runs))


def _run(
    settings: Settings,
    seeds: Sequence[int],
    *,
    words: Sequence[str],
    runs: _RunOptions,
) -> int:
    from zero_sim.against.watch import ScriptWatch
    from zero_sim.replicas.shares import shared_rows_note
    from zero_sim.script.launch import Launcher
    from zero_sim.script.program import read_script
    from zero_sim.script.rank_local_modules import check_found
    from zero_sim.script.record import first_difference

    # True counts as 1, which skips the -m.
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    script = read_script(name, is_module=is_module, arguments=arguments)
    first: ScriptRun | None = None
    of_first: ScriptWatch | None = None
    with Launcher(script, settings) as launcher:
        check_found(settings.packages, folder=script.folder)
        for seed in seeds:
            # A new watch for each run, because replicas are compared within a run.
            watch = ScriptWatch(allowed=runs.allow_drift)
            launcher.guest = watch
            # Only the first run prints: later runs would repeat its output.
            with watch.watching():
                run = launcher.run(seed=seed, quiet=first is not None)
            found = _print_watched(watch, is_first=first is None)
            if found or (first is None and run.failure is not None):
                _print_failure(run)
                return _finish(settings, (seed,), words=words, runs=runs)
            if first is None:
                first, of_first = run, watch
                continue
            # If a later run fails, this is a difference from the first run.
            difference = first_difference(first, run, ignored=runs.ignore)
            if difference:
                _print(f"Error: runs with seeds {first.seed} and {seed} differ: {difference}")
                if run.failure is not None:
                    _print_failure(run)
                return _finish(settings, (first.seed, seed), words=words, runs=runs)
    assert first is not None
    assert of_first is not None
    rows = shared_rows_note([log for _, log in sorted(of_first.rows.items())])
    if rows:
        _print(f"Note: {rows}")
    replicas = len(of_first.replicas.compared)
    _print(_summary(first, settings, count=len(seeds), replicas=replicas))
    return 0


def _print_watched(watch: ScriptWatch, *, is_first: bool) -> bool:
    """Report tensors that differ among ranks; return True if there is a finding."""
    # Warn for the first run only: later runs would repeat the warning.
    replicas = watch.replicas
    if replicas.findings:
        _print(f"Error: {replicas.finding}")
    elif is_first and replicas.warnings:
        _print(f"Warning: {replicas.warning}")
    return bool(replicas.findings)


def _print_failure(run: ScriptRun) -> None:
    failure = run.failure
    if failure is None:
        return
    # If the script itself exits, its traceback is of no interest.
    if isinstance(getattr(failure, "error", None), SystemExit):
        _print(f"Error: {run.ending}")
    else:
        _print(f"Error: {failure.report}")


def _finish(
    settings: Settings,
    seeds: Sequence[int],
    *,
    words: Sequence[str],
    runs: _RunOptions,
) -> int:
    # --ignore is refused for a single run, because nothing is compared.
    ignored = runs.ignore if len(seeds) > 1 else None
    command = repeat_command(
        settings, seeds, words=words, ignored=ignored, allowed_drift=runs.allow_drift
    )
    _print(f"  repeat: {command}")
    return EXIT_FOUND


def _summary(run: ScriptRun, settings: Settings, *, count: int, replicas: int) -> str:
    how = f"timing {settings.timing}, schedule {settings.schedule}"
    if run.collective_count:
        calls = f"{run.collective_count} calls of collectives"
    else:
        calls = "no collective was called"
    if replicas:
        noun = "replicas are" if replicas > 1 else "replica is"
        calls += f"; {replicas} {noun} equal on all ranks"
    if count == 1:
        return f"{_ranks(run, settings)} finished: seed {run.seed}, {how}; {calls}"
    points = sum(map(len, run.points))
    compared = f"{points} points of all ranks" if points else "no zero_sim.checkpoint_here"
    return (
        f"{count} runs of {_ranks(run, settings)} are equal: {how}; {calls}; {compared}, "
        f"{len(run.output)} lines of rank 0"
    )


def _ranks(run: ScriptRun, settings: Settings) -> str:
    """Return the number of ranks in words: `2 ranks`, or `2, then 4 ranks` for two worlds."""
    # A script that calls mp.spawn may start several worlds in turn.
    sizes = run.started or (settings.world_size,)
    return f"{', then '.join(map(str, sizes))} ranks"


def _print(text: str) -> None:
    # If both streams go to the same file, the script's output comes first.
    sys.stdout.flush()
    click.echo(printable(text, lines=True), err=True)
