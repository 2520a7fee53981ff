"""A step in any scenario: buckets, shards, all calls over time, and live bytes."""

from __future__ import annotations

from zero_sim.calculators.ledger import RankLedger
from zero_sim.calculators.measure import Measured, measure
from zero_sim.calculators.network import Network
from zero_sim.cost.forms import BucketForm, by_registration
from zero_sim.report.area_chart import Chart, Point
from zero_sim.report.ledger import chosen_moments
from zero_sim.report.svg_timeline import draw_timeline
from zero_sim.report.timeline import read_timeline
from zero_sim.report.walks import Cell, Step, Table, Walk
from zero_sim.run.dp_cp_groups import DpCpGroup
from zero_sim.scenario.spec import Scenario
from zero_sim.walkthrough import prose

CALLS_MAX = 200
"""Maximum number of calls to show."""
_NAMES_SHOWN = 4


def walk_step(scenario: Scenario) -> Walk:
    """Return the walkthrough of a case's second step, or its only step.

    Args:
        scenario: A validated case.
    """
    measured = measure(scenario)
    steps = [_layout(measured), _calls(measured), _timeline(measured)]
    steps += _moments(measured.ledgers[0])
    steps.append(_held(measured))
    about = scenario.description or "One step, from the event log and the ledger of rank 0."
    return Walk(title=f"A step of {scenario.name or 'a case'}", about=about, steps=steps)


def _layout(measured: Measured) -> Step:
    group = measured.groups[0]
    ranks = group.ranks
    # The first dp-cp group only, because others train other params.
    by_rank = [_forms(measured, group, index) for index in range(len(ranks))]
    rows: list[list[Cell | str]] = []
    for number, form in enumerate(by_rank[0]):
        names = ", ".join(form.names[:_NAMES_SHOWN])
        more = len(form.names) - _NAMES_SHOWN
        cells: list[Cell | str] = [
            str(number),
            names + (f" and {more} more" if more > 0 else ""),
            form.param_dtype,
            str(form.payload_elems),
            str(form.elems - form.payload_elems),
        ]
        for own in by_rank:
            # Ranks with different experts may have different numbers of buckets.
            shard = own[number] if number < len(own) else None
            cells.append("" if shard is None else _shard(shard))
        rows.append(cells)
    forms = (
        "by the closed forms of its stage"
        if measured.is_costed
        else "by the closed forms of the textbook's stage; this system's own layout may differ"
    )
    head = ("bucket", "params", "dtype", "elements", "padding", *(f"rank {rank}" for rank in ranks))
    return prose.step(
        "step.layout",
        [prose.table("step.layout", rows, head=head)],
        stage=measured.scenario.system.stage,
        ranks=len(ranks),
        forms=forms,
    )


def _forms(measured: Measured, group: DpCpGroup, index: int) -> list[BucketForm]:
    return by_registration(measured.sizes[group.ranks[index]], scenario=group.scenario, rank=index)


def _shard(form: BucketForm) -> Cell:
    if not form.is_sharded:
        return Cell("all", "own")
    # A shard with padding owns fewer elements than it has.
    start, stop = form.shard_start, form.shard_start + form.shard_elems
    return Cell(f"[{start}, {stop})", "own" if form.owned_elems == form.shard_elems else "sent")


def _calls(measured: Measured) -> Step:
    records = measured.records[0]
    rows = [
        [
            str(number + 1),
            record.kind,
            # Cut, because a large group's ranks would fill the page.
            f"{record.group} {list(record.group_ranks)}"[:60],
            f"{record.elems:,} {record.dtype}",
            f"{record.bytes:,}",
            "later" if record.asynchronous else "at once",
            record.site,
        ]
        for number, record in enumerate(records[:CALLS_MAX])
    ]
    # Any network will do, because only the sum over all links is shown.
    traffic = measured.traffic(0, network=Network())
    left = len(records) - len(rows)
    more = f" The table shows the first {CALLS_MAX}." if left > 0 else ""
    return prose.step(
        "step.calls",
        [prose.table("step.calls", rows)],
        count=len(records),
        sent=int(traffic.sent),
        rest=more,
    )


def _timeline(measured: Measured) -> Step:
    picture, extent = draw_timeline(measured.log, None)
    # Pictures are on pages only, so the table shows the calls too.
    timeline = read_timeline(measured.log)
    rows = [
        [
            str(call.issue_tick),
            "" if call.land_tick is None else str(call.land_tick),
            f"rank {call.record.rank}",
            call.record.kind,
        ]
        for call in timeline.calls[:CALLS_MAX]
    ]
    table = prose.table("step.timeline", rows)
    return prose.step("step.timeline", [table], picture=picture, shown=extent)


def _moments(ledger: RankLedger) -> list[Step]:
    samples = chosen_moments(ledger.samples)
    points = [Point(name=f"{s.phase}: {s.where}", phase=s.phase, amounts=s.bytes) for s in samples]
    return [
        Step(
            title=f"{sample.phase}: {sample.where}",
            tables=[
                Table(
                    head=("category", "bytes"),
                    rows=[
                        *([name.replace("_", " "), f"{n:,}"] for name, n in sample.bytes.items()),
                        ["all", f"{sample.total:,}"],
                    ],
                )
            ],
            chart=Chart(title="Live bytes of rank 0", unit="bytes", points=points, now=index),
        )
        for index, sample in enumerate(samples)
    ]


def _held(measured: Measured) -> Step:
    names = measured.ledgers[0].categories
    rows = [
        [f"rank {ledger.rank}", *(f"{ledger.between.get(name, 0):,}" for name in names),
         f"{ledger.peak.total:,}", f"{ledger.peak.phase}: {ledger.peak.where}"]
        for ledger in measured.ledgers
    ]  # fmt: skip
    # Closed forms only apply to systems that declare their costs.
    found = list(measured.differences()) if measured.is_costed else []
    agree = f"Closed forms differ: {found[0]}." if found else "The closed forms agree."
    head = ("", *(name.replace("_", " ") for name in names), "peak", "at")
    table = prose.table("step.held", rows, head=head)
    return prose.step("step.held", [table], more=[agree] if measured.is_costed else [])
