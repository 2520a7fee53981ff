"""Ledgers as text: live bytes by moment and sent bytes, next to the closed forms."""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.calculators.ledger import RankLedger, Sample
from zero_sim.calculators.measure import Measured
from zero_sim.calculators.network import Network
from zero_sim.calculators.rows import MemoryRow, TrafficRow
from zero_sim.report.amounts import aligned, bar, in_unit, unit_for
from zero_sim.untrusted import printable

MOMENTS_MAX = 60
"""Moments of a step to show. If there are more, choose those with the largest changes."""


def render_memory_ledger(measured: Measured, row: MemoryRow) -> str:
    """Render the first rank's memory by moment, next to the closed forms.

    Args:
        measured: The run.
        row: The first rank's closed forms.
    """
    # One unit for all columns, so that they can be compared.
    ledger = measured.ledgers[0]
    unit = unit_for([ledger.peak.total])
    held = row.footprint.held
    peak = ledger.peak
    table = [
        ["rank 0", "closed form", f"measured {unit[0]}", "at the peak", "at most", "in", "when"]
    ]
    # First the categories of the closed forms, then those that only the run has.
    for name in dict.fromkeys((*held, *ledger.categories)):
        most = ledger.peak_of(name)
        table.append(
            [
                name,
                in_unit(held[name], unit) if name in held and measured.is_costed else "",
                "not reported" if name in ledger.unreported else in_unit(_held(ledger, name), unit),
                in_unit(peak.bytes.get(name, 0), unit),
                in_unit(most.bytes.get(name, 0), unit),
                most.phase,
                most.where,
            ]
        )
    total, most = (in_unit(amount, unit) for amount in (sum(ledger.between.values()), peak.total))
    table.append(["all", "", total, most, most, peak.phase, peak.where])
    lines = [
        f"Measured: step {measured.step} on {len(measured.ledgers)} simulated ranks.",
        "",
        *aligned(table).splitlines(),
        "",
        *_moments(ledger.samples, unit),
        "",
        *_verdict(measured),
    ]
    return printable("\n".join(lines), lines=True)


def render_traffic_ledger(measured: Measured, row: TrafficRow, *, network: Network) -> str:
    """Render the first rank's calls next to the closed forms."""
    traffic = measured.traffic(0, network=network)
    unit = unit_for([float(traffic.sent)])
    table = [["rank 0", "group", "N", "dtype", "calls", "messages", f"sent {unit[0]}"]]
    table += [
        [
            flow.kind,
            flow.group,
            str(flow.ranks),
            flow.dtype,
            f"{flow.calls:,}",
            f"{flow.messages:,}",
            in_unit(float(flow.total_sent), unit),
        ]
        for flow in traffic.flows
    ]
    closed = in_unit(float(row.traffic.sent), unit)
    lines = [
        f"Measured: step {measured.step} on {len(measured.ledgers)} simulated ranks.",
        "",
        *aligned(table, words=range(2)).splitlines(),
        "",
        f"Total sent: {in_unit(float(traffic.sent), unit)} {unit[0]}"
        + (f", by closed form {closed} {unit[0]}." if measured.is_costed else "."),
        *_verdict(measured),
    ]
    return printable("\n".join(lines), lines=True)


def measured_dict(measured: Measured, *, network: Network | None = None) -> dict[str, object]:
    """Return a run's ledgers, ready for JSON.

    Args:
        measured: The run.
        network: Network between its ranks; None to omit traffic.
    """
    ranks: list[dict[str, object]] = []
    for ledger in measured.ledgers:
        peak = ledger.peak
        entry: dict[str, object] = {
            "rank": ledger.rank,
            "bytes": dict(ledger.between),
            "peak": peak.total,
            "peak_bytes": dict(peak.bytes),
            "peak_at": f"{peak.phase}: {peak.where}",
            "unreported": list(ledger.unreported),
            "bytes_sent": None,
        }
        if network is not None:
            entry["bytes_sent"] = measured.traffic(ledger.rank, network=network).by_kind()
        ranks.append(entry)
    return {
        "step": measured.step,
        "ranks": ranks,
        "is_costed": measured.is_costed,
        "differences": list(measured.differences()),
    }


def _held(ledger: RankLedger, name: str) -> int:
    return ledger.between.get(name, 0)


def chosen_moments(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return all moments, or the `MOMENTS_MAX` with the largest changes of the total."""
    if len(samples) <= MOMENTS_MAX:
        return samples
    # The first moment and the largest changes, in order of time.
    places = range(1, len(samples))
    changes = sorted(places, key=lambda i: -abs(samples[i].total - samples[i - 1].total))
    return [samples[i] for i in sorted({0, *changes[: MOMENTS_MAX - 1]})]


def _moments(samples: Sequence[Sample], unit: tuple[str, int]) -> list[str]:
    """Return the live bytes at each moment as bars."""
    # Bars are shares of the largest total, which is 0 if nothing is live.
    most = max(sample.total for sample in samples) or 1
    shown = chosen_moments(samples)
    rows = [["phase", "moment", "", unit[0]]]
    for sample in shown:
        amount = in_unit(sample.total, unit)
        rows.append([sample.phase, sample.where, bar(sample.total / most), amount])
    left = len(samples) - len(shown)
    more = [f"... the largest changes of {len(samples)} moments."] if left else []
    return [*aligned(rows, words=range(3)).splitlines(), *more]


def _verdict(measured: Measured) -> list[str]:
    if not measured.is_costed:
        return [
            "The system does not declare its costs, so it is not checked against closed forms. "
            "Memory without a declared category is listed under the phase that allocated it."
        ]
    found = list(measured.differences())
    if found:
        return ["Closed forms and ledgers differ:", *(f"  {each}" for each in found)]
    return ["Closed forms and ledgers are equal on all ranks, in bytes between steps and in calls."]
