"""The command `zero-sim torchrun`: a script as it is, on a simulated world."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from zero_sim.cli.parts import a_number, require_with
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.script.launch import Settings
    from zero_sim.script.record import ScriptRun

EXIT_FOUND = 1
_IGNORED = (
    "--log-dir",
    "--log_dir",
    "--max-restarts",
    "--max_restarts",
    "--monitor-interval",
    "--monitor_interval",
    "--node-rank",
    "--node_rank",
    "--rdzv-backend",
    "--rdzv_backend",
    "--rdzv-conf",
    "--rdzv_conf",
    "--rdzv-endpoint",
    "--rdzv_endpoint",
    "--rdzv-id",
    "--rdzv_id",
    "--role",
    "--start-method",
    "--start_method",
)
"""Options of torchrun that say how processes find each other."""


class _Numbers(click.ParamType):
    name = "N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.isascii() and word.isdecimal() for word in words):
            self.fail(f"expected numbers such as 0,3; got {value!r}", param, ctx)
        return tuple(map(int, words))


class _Pattern(click.ParamType):
    name = "regex"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> re.Pattern[str]:
        try:
            return re.compile(str(value))
        except re.error as error:
            self.fail(f"expected a regular expression, got {value!r}: {error}", param, ctx)


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--nproc-per-node",
    "--nproc_per_node",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Ranks a node.",
)
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Nodes."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--order", default="linear", show_default=True, help="Order in which reductions add.")
@click.option(
    "--schedule",
    type=click.Choice(["round-robin", "random", "pct"]),
    help="Which rank runs next.  [default: round-robin; of several runs random]",
)
@click.option(
    "--timing",
    type=click.Choice(["eager", "lazy", "hostile"]),
    help="When operations read and write.  [default: eager; of several runs hostile]",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of schedule, timing, and what the script leaves to chance.",
)
@click.option("--depth", type=click.IntRange(min=1), default=3, show_default=True, hidden=True)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Run with so many seeds, from --seed on, and tell of the first run that differs from the "
    "first: in how it ends, in the output of rank 0, or at zero_sim.checkpoint_here.",
)
@click.option("--seeds", type=_Numbers(), help="Run with these seeds.")
@click.option(
    "--ignore",
    type=_Pattern(),
    metavar="REGEX",
    help="Do not compare lines in which this is found, such as times.",
)
@click.option(
    "--races/--no-races",
    default=None,
    help="Look at every operation for uses of memory in flight.  [default: of several runs]",
)
@click.option("--no-strict", is_flag=True, help="Accept what gloo accepts and NCCL does not.")
@click.option(
    "--own-modules",
    multiple=True,
    metavar="PACKAGE",
    help="Let every rank import a package for itself, as it does the modules of the script's "
    "folder, so that its globals are not shared.",
)
@click.option("--cuda-is-cpu", is_flag=True, help="Let devices named cuda be the CPU.")
@click.option("--output-of", type=_Numbers(), help="Show what only these ranks print.")
@click.option(
    "--stall-seconds",
    type=click.FloatRange(min=0.001, max=10**6),
    callback=a_number,
    default=300.0,
    show_default=True,
    metavar="S",
    help="Longest time without a call of torch.distributed.",
)
@click.option("--master-addr", "--master_addr", default="localhost", hidden=True)
@click.option("--master-port", "--master_port", type=int, default=29500, hidden=True)
@click.option("--standalone", is_flag=True, hidden=True)
@click.option(*_IGNORED, "ignored", multiple=True, hidden=True)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def torchrun(
    ctx: click.Context,
    nproc_per_node: int,
    nnodes: int,
    module: bool,
    order: str,
    schedule: str | None,
    timing: str | None,
    seed: int,
    depth: int,
    runs: int,
    seeds: tuple[int, ...] | None,
    ignore: re.Pattern[str] | None,
    races: bool | None,
    no_strict: bool,
    own_modules: tuple[str, ...],
    cuda_is_cpu: bool,
    output_of: tuple[int, ...] | None,
    stall_seconds: float,
    master_addr: str,
    master_port: int,
    standalone: bool,
    ignored: tuple[str, ...],
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT, as torchrun would, on ranks of a simulated world in one process.

    Nothing is changed in it. Each rank has its own environment, arguments, random numbers and
    modules of the script's folder. Files are shared: what one run leaves, the next one finds.

    Exit status: 0 every rank came to its end; 1 a rank raised or exited with an error, or there
    was a deadlock, a race, a violation of the contract, or a difference between runs; 2 the usage
    is wrong, or the script ended the process.
    """
    if seeds is not None and runs != 1:
        raise UsageError("expected --runs or --seeds, got both.")
    chosen = seeds or tuple(range(seed, seed + runs))
    several = len(chosen) > 1
    require_with(ctx, "--runs or --seeds", "ignore", given=several)
    with packages_needed():
        from zero_sim.script.launch import Settings
    settings = Settings(
        ranks_per_node=nproc_per_node,
        nodes=nnodes,
        order=order,
        schedule=schedule or ("random" if several else "round-robin"),
        timing=timing or ("hostile" if several else "eager"),
        depth=depth,
        races=several if races is None else races,
        strict=not no_strict,
        stall_seconds=stall_seconds,
        packages=own_modules,
        cuda_is_cpu=cuda_is_cpu,
        address=master_addr,
        port=master_port,
        shown=None if output_of is None else frozenset(output_of),
    )
    words = (*(["-m"] if module else []), script, *arguments)
    ctx.exit(_run(settings, chosen, words=words, ignored=ignore))


def _run(
    settings: Settings,
    seeds: Sequence[int],
    *,
    words: Sequence[str],
    ignored: re.Pattern[str] | None,
) -> int:
    from zero_sim.script.compare import first_difference
    from zero_sim.script.launch import Launcher
    from zero_sim.script.own_modules import check_found
    from zero_sim.script.program import read_script

    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    script = read_script(name, is_module=is_module, arguments=arguments)
    first: ScriptRun | None = None
    with Launcher(script, settings) as launcher:
        check_found(settings.packages, folder=script.folder)
        for seed in seeds:
            run = launcher.run(seed=seed, quiet=first is not None)
            if first is None:
                first = run
                if run.failure is not None:
                    _tell_failure(run)
                    return _finish(settings, (seed,), words=words)
                continue
            difference = first_difference(first, run, ignored=ignored)
            if difference:
                _say(f"Error: runs with seeds {first.seed} and {seed} differ: {difference}")
                if run.failure is not None:
                    _tell_failure(run)
                return _finish(settings, (first.seed, seed), words=words, ignored=ignored)
    assert first is not None
    _say(_summary(first, settings, count=len(seeds)))
    return 0


def _tell_failure(run: ScriptRun) -> None:
    failure = run.failure
    if failure is None or isinstance(getattr(failure, "error", None), SystemExit):
        _say(f"Error: {run.ending}")
    else:
        _say(f"Error: {failure.report}")


def _finish(
    settings: Settings,
    seeds: Sequence[int],
    *,
    words: Sequence[str],
    ignored: re.Pattern[str] | None = None,
) -> int:
    _say(f"  repeat: {repeat_command(settings, seeds, words=words, ignored=ignored)}")
    return EXIT_FOUND


def _summary(run: ScriptRun, settings: Settings, *, count: int) -> str:
    how = f"timing {settings.timing}, schedule {settings.schedule}"
    if run.collective_count:
        calls = f"{run.collective_count} calls of collectives"
    else:
        calls = "no collective was called"
    if count == 1:
        return f"{settings.world_size} ranks came to their end: seed {run.seed}, {how}; {calls}"
    points = sum(map(len, run.points))
    compared = f"{points} points of all ranks" if points else "no zero_sim.checkpoint_here"
    return (
        f"{count} runs of {settings.world_size} ranks are equal: {how}; {calls}; {compared}, "
        f"{len(run.output)} lines of rank 0"
    )


def repeat_command(
    settings: Settings,
    seeds: Sequence[int],
    *,
    words: Sequence[str],
    ignored: re.Pattern[str] | None = None,
) -> str:
    """The command that runs a script again in the same way.

    Args:
        settings: The world.
        seeds: Those to run with.
        words: The script and its arguments.
        ignored: What lines are not compared.
    """
    from zero_sim.script.launch import Settings

    usual = Settings(ranks_per_node=1)
    options = ["--nproc-per-node", str(settings.ranks_per_node)]
    for option, name in (
        ("--nnodes", "nodes"),
        ("--order", "order"),
        ("--depth", "depth"),
        ("--stall-seconds", "stall_seconds"),
        ("--master-addr", "address"),
        ("--master-port", "port"),
    ):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            options += [option, str(value)]
    options += ["--timing", settings.timing, "--schedule", settings.schedule]
    if settings.races != (len(seeds) > 1):
        options += ["--races" if settings.races else "--no-races"]
    flags = (("--no-strict", not settings.strict), ("--cuda-is-cpu", settings.cuda_is_cpu))
    options += [flag for flag, given in flags if given]
    for package in settings.packages:
        options += ["--own-modules", package]
    if settings.shown is not None:
        options += ["--output-of", ",".join(map(str, sorted(settings.shown)))]
    if ignored is not None:
        options += ["--ignore", ignored.pattern]
    if len(seeds) == 1:
        options += ["--seed", str(seeds[0])]
    else:
        options += ["--seeds", ",".join(map(str, seeds))]
    return shlex.join(["zero-sim", "torchrun", *options, *words])


def _say(text: str) -> None:
    sys.stdout.flush()
    click.echo(printable(text, lines=True), err=True)
