"""The commands `memory` and `traffic`: training costs by closed forms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zero_sim.cli.counts import Count, Counts, joined
from zero_sim.cli.parts import FILE, echo_report, json_option, option, takes
from zero_sim.cli.session import progress
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed
from zero_sim.host.terminal import columns_of

if TYPE_CHECKING:
    from zero_sim.calculators.counted import Model
    from zero_sim.calculators.limits import LimitRow
    from zero_sim.calculators.measure import Measured
    from zero_sim.calculators.network import Network
    from zero_sim.calculators.rows import MemoryRow
    from zero_sim.scenario.spec import DtypeName

# Far above any model and cluster, to catch slips such as 7e90.
PARAMS_MAX = 10**15
RANKS_MAX = 2**20
GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class _ModelRequest:
    """Settings of the table; a list of values gives several rows."""

    params: int | None = option(
        "--params", type=Count(PARAMS_MAX), metavar="P", help="Number of params, such as 7e9."
    )
    ranks: tuple[int, ...] = option(
        "--ranks",
        type=Counts(RANKS_MAX),
        multiple=True,
        callback=joined,
        metavar="N,...",
        help="Numbers of ranks that train one set of params, such as 2,4,1_024. Repeatable.",
    )
    stages: tuple[str, ...] = option(
        "--stage",
        type=click.Choice(["0", "1", "2", "3"]),
        multiple=True,
        help="ZeRO stage. Repeatable.",
    )
    redundancies: tuple[int, ...] = option(
        "--redundancy",
        type=Counts(RANKS_MAX),
        multiple=True,
        callback=joined,
        metavar="K,...",
        help="Numbers of replicas per shard.",
    )
    dtype: DtypeName | None = option(
        "--dtype",
        type=click.Choice(["bf16", "fp16", "fp32"]),
        help="With --params: dtype of params and gradients.  [default: bf16]",
    )
    optimizer: str | None = option(
        "--optimizer", metavar="NAME", help="Class of torch.optim, such as adamw or sgd."
    )
    no_masters: bool = option(
        "--no-masters", is_flag=True, help="Let the optimizer step the params, not fp32 copies."
    )
    micro_batches: int | None = option(
        "--micro-batches", type=Count(10**5), metavar="M", help="Micro-batches per step."
    )

    @property
    def has_masters(self) -> bool:
        """True if the optimizer steps fp32 copies of the params."""
        return not self.no_masters


@dataclass(frozen=True, kw_only=True, slots=True)
class _SystemRequest:
    """Options that override fields of `system`."""

    grad_dtype: str | None = option(
        "--grad-dtype", type=click.Choice(["param", "fp32"]), help="Dtype of the gradient buffer."
    )
    bucket_elems: int | None = option(
        "--bucket-elems",
        type=Count(PARAMS_MAX),
        metavar="E",
        help="Number of elements after which a bucket is closed.",
    )
    reduce_buffer_elems: int | None = option(
        "--reduce-buffer-elems",
        type=Count(PARAMS_MAX),
        metavar="E",
        help="Stages 1 and 2: elements in the reduce buffer. With --bucket-elems, there are two "
        "buffers.",
    )
    gather_chunk_elems: int | None = option(
        "--gather-chunk-elems",
        type=Count(PARAMS_MAX),
        metavar="E",
        help="Stages 1 and 2: maximum number of elements per gather.",
    )
    buffers_by: str | None = option(
        "--buffers-by",
        type=click.Choice(["dtype", "param-group"]),
        help="Share a buffer among params of the same dtype, or of the same param group.",
    )
    offload_state: bool = option(
        "--offload-state", is_flag=True, help="Keep masters and optimizer state on the CPU."
    )


_source = click.argument("source", metavar="[FILE|MODULE:NAME]", required=False)
_topology = click.option(
    "--topology",
    type=FILE,
    metavar="FILE",
    help="Nodes and links, as TOML.  [default: nodes of 8 ranks]",
)
_curve = click.option("--curve", is_flag=True, help="Draw the bytes for 1 to 16,384 ranks.")
_measure = click.option(
    "--measure", is_flag=True, help="Also run a step on simulated ranks and compare."
)


@click.command()
@_source
@takes(_ModelRequest, "request")
@takes(_SystemRequest, "system")
@_curve
@_measure
@json_option
@click.pass_context
def memory(
    ctx: click.Context,
    source: str | None,
    curve: bool,
    measure: bool,
    as_json: bool,
    request: _ModelRequest,
    system: _SystemRequest,
) -> None:
    """Calculate a rank's memory by category.

    Give a number of params, a scenario file, or a module to import. The bytes come from the closed
    forms that zero-sim checks runs against. A GB is 10^9 bytes, a GiB 2^30.

    Exit status: 0 done, 1 --measure found a difference between forms and run, 2 the usage is wrong,
    4 this machine has too little memory for the run.

    \b
    Examples:
      zero-sim memory --params 7e9 --ranks 8
      zero-sim memory --ranks 2,4,8,64,1024
      zero-sim memory --params 7e9 --curve --stage 3
      zero-sim memory my.toml --measure
    """
    from zero_sim.calculators.rows import alone, memory_row
    from zero_sim.report.costs import render_curve, render_limits, render_memory

    is_counted = request.params is not None
    if source is None and len(request.ranks) > 1 and not (curve or measure):
        from zero_sim.calculators.limits import PARAMS

        request = replace(request, params=request.params or PARAMS)
    models = _models(source, request, system, needs_ranks=not curve)
    chosen, has_masters = _chosen(models, request, curve=curve), request.has_masters
    limits = [] if curve else _limits(models, request)
    runs = _run_all(chosen, has_masters=has_masters, curve=curve) if measure else []
    rows = [memory_row(model, has_masters=has_masters) for model in chosen]
    baseline = alone(models[0], has_masters=has_masters) if len(models) == 1 else None
    first, columns = rows[0], columns_of(sys.stdout)
    if as_json:
        first_row = first.as_dict()
        echo_report(
            {
                "bytes_per_rank": first_row["bytes_per_rank"],
                "total": first.footprint.total,
                "rows": [row.as_dict() for row in rows],
                "single_device": None
                if baseline is None
                else {
                    name: {**held, "total": sum(held.values())} for name, held in baseline.items()
                },
                "limits": [row.as_dict() for row in limits],
                "measured": _measured_dicts(runs),
            }
        )
    elif curve:
        click.echo(render_curve(_series(rows), what="Bytes of a rank", unit="GB"))
    elif measure:
        from zero_sim.report.ledger import render_memory_ledger

        texts = [render_memory_ledger(run, row) for run, row in zip(runs, rows, strict=True)]
        click.echo("\n\n".join([render_memory(rows, alone=baseline, columns=columns), *texts]))
    elif limits and not is_counted:
        click.echo(render_limits(limits, params=models[0].elems))
    else:
        texts = [render_memory(rows, alone=baseline, columns=columns)]
        texts += [render_limits(limits, params=models[0].elems)] if limits else []
        texts += _waterfall(chosen[-1], rows[-1], has_masters=has_masters)
        click.echo("\n\n".join(texts))
    ctx.exit(int(any(any(run.differences()) for run in runs)))


@click.command()
@_source
@takes(_ModelRequest, "request")
@takes(_SystemRequest, "system")
@_topology
@_measure
@json_option
@click.pass_context
def traffic(
    ctx: click.Context,
    source: str | None,
    topology: Path | None,
    measure: bool,
    as_json: bool,
    request: _ModelRequest,
    system: _SystemRequest,
) -> None:
    """Estimate the bytes that a rank sends in a step, by kind and link.

    Assumes that collectives run as rings.

    \b
    Examples:
      zero-sim traffic --params 7e9 --ranks 64 --stage 3
      zero-sim traffic my.toml --topology cluster.toml
    """
    from zero_sim.calculators.rows import traffic_row
    from zero_sim.report.costs import render_traffic

    models, network = _models(source, request, system), _network(topology)
    chosen = _chosen(models, request)
    runs = _run_all(chosen, has_masters=request.has_masters) if measure else []
    rows = [traffic_row(model, network=network) for model in chosen]
    if as_json:
        first_row = rows[0].as_dict()
        echo_report(
            {
                "bytes_sent_per_rank": first_row["bytes_sent_per_rank"],
                "total": first_row["total"],
                "rows": [row.as_dict() for row in rows],
                "network": asdict(network),
                "measured": _measured_dicts(runs, network=network),
            }
        )
    else:
        from zero_sim.report.ledger import render_traffic_ledger

        texts = [
            render_traffic_ledger(run, row, network=network)
            # Without --measure, there are rows but no runs.
            for run, row in zip(runs, rows, strict=bool(runs))
        ]
        click.echo("\n\n".join([render_traffic(rows, columns=columns_of(sys.stdout)), *texts]))
    ctx.exit(int(any(any(run.differences()) for run in runs)))


def _models(
    source: str | None, request: _ModelRequest, system: _SystemRequest, *, needs_ranks: bool = True
) -> list[Model]:
    """Return the models with the given options applied."""
    # Exactly one of both must be given.
    if (source is None) == (request.params is None):
        got = "neither" if source is None else "both"
        raise UsageError(
            f"expected --params, or a scenario file, or module:name; got {got}. "
            "Try --params 7e9 --ranks 8."
        )
    if request.params is not None:
        from zero_sim.calculators.counted import counted_model

        # A scenario has its own number of ranks, a number of params has none.
        if not request.ranks and needs_ranks:
            raise UsageError("expected --ranks with --params, got none. Try --ranks 8.")
        models = [counted_model(request.params, dtype=request.dtype or "bf16")]
    else:
        if request.dtype is not None:
            raise UsageError(
                "expected --dtype with --params only, because a model has its own dtypes. Remove "
                "--dtype."
            )
        assert source is not None
        with packages_needed():
            from zero_sim.calculators.models import model_of_name, models_of_file
        # A path may contain a colon too, so try files first.
        is_name = ":" in source and not Path(source).exists()
        models = [model_of_name(source)] if is_name else models_of_file(Path(source))
    return [_with_settings(model, request, system) for model in models]


def _with_settings(model: Model, request: _ModelRequest, system: _SystemRequest) -> Model:
    from zero_sim.calculators.state import check_name

    # Only given options replace settings of the model.
    scenario = model.scenario
    if request.optimizer is not None:
        name = check_name(request.optimizer)
        scenario = replace(scenario, optimizer=replace(scenario.optimizer, name=name))
    if request.micro_batches is not None:
        scenario = replace(scenario, run=replace(scenario.run, micro_batches=request.micro_batches))
    # Other options are None or False and keep the model's setting.
    fields: dict[str, Any] = {name: value for name, value in asdict(system).items() if value}
    scenario = replace(scenario, system=replace(scenario.system, **fields))
    return replace(model, scenario=scenario)


def _chosen(models: Sequence[Model], request: _ModelRequest, *, curve: bool = False) -> list[Model]:
    """Return all models with all combinations of ranks, stages and replicas."""
    from zero_sim.calculators import rows

    # A model given as a number of params has no stage, so show all stages.
    stages: list[Any] = [int(stage) for stage in request.stages]
    if not stages and all(model.counted for model in models):
        stages = [0, 1, 2, 3]
    replicas = request.redundancies
    if not curve:
        return list(rows.choices(models, ranks=request.ranks, stages=stages, redundancies=replicas))
    # A curve has its own numbers of ranks, and room for a single model.
    if len(models) > 1 or request.ranks:
        got = "--ranks" if request.ranks else f"{len(models)} cases"
        raise UsageError(f"expected one case and no --ranks with --curve, got {got}.")
    return list(rows.curve(models[0], stages=stages, redundancies=replicas))


def _limits(models: Sequence[Model], request: _ModelRequest) -> list[LimitRow]:
    """Return rows by number of ranks; empty without --params or with a single number of ranks."""
    if len(request.ranks) < 2 or request.redundancies or not models[0].counted:
        return []
    from zero_sim.calculators.limits import limit_rows

    stages: list[Any] = [int(stage) for stage in request.stages] or [0, 1, 2, 3]
    return limit_rows(
        models[0], ranks=request.ranks, stages=stages, has_masters=request.has_masters
    )


def _waterfall(model: Model, row: MemoryRow, *, has_masters: bool) -> list[str]:
    """Return a waterfall chart from stage 0 to the row; empty for stage 0."""
    from zero_sim.calculators.rows import memory_row
    from zero_sim.report.costs import render_waterfall

    if not row.stage:
        return []
    # Stage 0 shards nothing, so it has no replicas of shards.
    plain = memory_row(model.with_choice(stage=0, redundancy=1), has_masters=has_masters)
    title = f"{row.model}: stage 0 to stage {row.stage}, {row.ranks:,} ranks"
    return [render_waterfall(plain.footprint.held, row.footprint.held, title=title)]


def _run_all(chosen: Sequence[Model], *, has_masters: bool, curve: bool = False) -> list[Measured]:
    """Run a step of each model.

    Raises:
        UsageError: A model cannot be run.
        EnvironmentProblem: This machine has too little memory.
    """
    if curve:
        raise UsageError("expected --measure without --curve, got both. Remove one of them.")
    with packages_needed():
        from zero_sim.calculators.measure import check_fits, measure
        from zero_sim.calculators.models import case_of
    if not has_masters:
        raise UsageError(
            "expected --measure without --no-masters, because our own system keeps fp32 masters. "
            "Remove one of them."
        )
    # Check all models before the first run, which may take minutes.
    for model in chosen:
        check_fits(model)
    measured = []
    for model in chosen:
        with case_of(model) as case, progress(f"measure {case.name}"):
            measured.append(measure(case))
    return measured


def _series(rows: Sequence[MemoryRow]) -> dict[str, list[tuple[int, float]]]:
    """Return (ranks, GB) pairs by stage and number of replicas."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = f"stage {row.stage}" + (f", K = {row.redundancy}" if row.redundancy > 1 else "")
        series.setdefault(name, []).append((row.ranks, row.footprint.total / GB))
    return series


def _measured_dicts(
    runs: Sequence[Measured], *, network: Network | None = None
) -> list[dict[str, object]] | None:
    if not runs:
        return None
    from zero_sim.report.ledger import measured_dict

    return [measured_dict(run, network=network) for run in runs]


def _network(path: Path | None) -> Network:
    from zero_sim.calculators.network import Network
    from zero_sim.calculators.network_file import load_network

    return Network() if path is None else load_network(path)
