"""Costs as text: tables, waterfalls, scaling curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zero_sim.calculators.limits import LimitRow
from zero_sim.calculators.rows import MemoryRow, TrafficRow
from zero_sim.report.amounts import (
    BAR_CHARS,
    aligned,
    binary_bytes,
    binary_unit,
    decimal_bytes,
    fitted,
    in_unit,
    unit_for,
)


def render_memory(
    rows: Sequence[MemoryRow],
    *,
    alone: Mapping[str, Mapping[str, int]] | None = None,
    columns: int | None = None,
) -> str:
    """Return a table of a rank's bytes, followed by the bytes of a single device.

    Args:
        rows: A row per way to train.
        alone: Bytes of a single device by kind, with gradients freed and kept.
        columns: Terminal width; None for no limit.
    """
    names = _categories([row.footprint.held for row in rows])
    unit = unit_for(row.footprint.peak for row in rows)
    binary = binary_unit(unit)
    head = ["model", "stage", "N", "K", *names, f"total {unit[0]}"]
    # Omit empty columns, so that the table fits a terminal.
    offloads = any(row.footprint.on_cpu for row in rows)
    head += [*([binary[0]] if binary else []), *(["on the CPU"] if offloads else [])]
    head += ["saved", "of one", "at most", "in"]
    table = [head]
    for row in rows:
        footprint = row.footprint
        table.append(
            [
                row.model,
                str(row.stage),
                f"{row.ranks:,}",
                str(row.redundancy),
                *(in_unit(footprint.held.get(name, 0), unit) for name in names),
                in_unit(footprint.total, unit),
                *([in_unit(footprint.total, binary)] if binary else []),
                *([in_unit(footprint.on_cpu, unit)] if offloads else []),
                f"{row.saved:.1%}",
                f"{row.saved_of_one_device:.1%}",
                in_unit(footprint.peak, unit),
                footprint.peak_at,
            ]
        )
    lines = [
        f"Bytes per rank in {unit[0]}{_size_of(unit)}, resident between two steps; `at most`: "
        "the peak within a step.",
        "Activations and temporary memory of kernels are not included.",
        "`saved`: compared with stage 0, which keeps gradients in a buffer; `of one`: compared "
        "with one device that frees them after a step.",
        "",
        fitted(table, columns=columns),
    ]
    if alone:
        freed, kept = (sum(alone[name].values()) for name in ("gradients_freed", "gradients_kept"))
        lines += [
            "",
            f"One device alone, without buffers: {decimal_bytes(freed)} ({binary_bytes(freed)}) "
            f"if gradients are freed after a step, {decimal_bytes(kept)} "
            f"({binary_bytes(kept)}) if they are kept.",
        ]
    return "\n".join(lines)


def render_limits(rows: Sequence[LimitRow], *, params: int) -> str:
    """Return a table of bytes by number of ranks, with the saved factor and share."""
    counts = list(rows[0].by_ranks)
    unit = unit_for(row.unsharded for row in rows)
    table = [["", "unsharded", *(f"N = {count:,}" for count in counts), "N to infinity", ""]]
    for row in rows:
        sharded = [*row.by_ranks.values(), row.limit]
        table += [
            [row.name, *(in_unit(b, unit) for b in (row.unsharded, *sharded)), unit[0]],
            # If all state is sharded, the limit is 0 bytes and the factor grows with N.
            ["", "", *(f"{row.unsharded / b:,.4g}x" if b else "N x" for b in sharded), "less"],
            ["", "", *(f"{1 - b / row.unsharded:.1%}" for b in sharded), "saved"],
        ]
    return "\n".join(
        [
            f"{params:,} params on N ranks, bytes per rank between two steps.",
            "`fp32, moments alone`: params, gradients and two moments in fp32, with only the "
            "moments sharded.",
            "",
            aligned(table, words=(0, len(table[0]) - 1)),
        ]
    )


def _waterfall(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return the bars of a waterfall as name, start and stop.

    The first and last bar are the totals of `before` and `after`. The others are changes by
    category, each starting where the previous bar ends.
    """
    level = sum(before.values())
    bars = [("before", 0, level)]
    for name in dict.fromkeys((*before, *after)):
        change = after.get(name, 0) - before.get(name, 0)
        if change:
            bars.append((name, level, level + change))
            level += change
    bars.append(("after", 0, level))
    return bars


def render_waterfall(before: Mapping[str, int], after: Mapping[str, int], *, title: str) -> str:
    """Return a waterfall from one total to another, as text."""
    bars = _waterfall(before, after)
    unit = unit_for(stop for _, _, stop in bars)
    # Solid totals and hatched changes, all on the same scale.
    most = max(max(start, stop) for _, start, stop in bars) or 1
    rows = [["", "", unit[0]]]
    for index, (name, start, stop) in enumerate(bars):
        low, high = sorted((start, stop))
        first, last = (round(amount / most * BAR_CHARS) for amount in (low, high))
        bar = " " * first + ("█" if index in (0, len(bars) - 1) else "▒") * max(1, last - first)
        signed = in_unit(stop - start, unit)
        rows.append(
            [name, f"{bar:<{BAR_CHARS}}", signed if stop < start or not start else f"+{signed}"]
        )
    # Outside of the table, because the title would widen the column of names.
    return f"{title}\n{aligned(rows, words=range(2))}"


def render_curve(series: Mapping[str, Sequence[tuple[int, float]]], *, what: str, unit: str) -> str:
    """Return a scaling curve as text: a row per number of ranks, a bar per series.

    Args:
        series: Pairs of ranks and amount, by series name.
        what: Name of the quantity.
        unit: Unit of the amounts.
    """
    # A common scale, so that series can be compared.
    amounts = [amount for pairs in series.values() for _, amount in pairs]
    most = max(amounts, default=0) or 1
    names = list(series)
    rows = [["N", *(text for name in names for text in (name, ""))]]
    by_ranks: dict[int, dict[str, float]] = {}
    for name, pairs in series.items():
        for ranks, amount in pairs:
            by_ranks.setdefault(ranks, {})[name] = amount
    width = max(4, BAR_CHARS // max(1, len(names)))
    for ranks, of in sorted(by_ranks.items()):
        cells = [f"{ranks:,}"]
        for name in names:
            amount = of.get(name)
            cells.append("" if amount is None else f"{amount:,.2f}")
            bar = "" if amount is None else "█" * max(1, round(amount / most * width))
            cells.append(f"{bar:<{width}}")
        rows.append(cells)
    return f"{what} in {unit}, by number of ranks N\n\n{aligned(rows, words=())}"


def render_traffic(rows: Sequence[TrafficRow], *, columns: int | None = None) -> str:
    """Return a table of the bytes that a rank sends, by kind and link.

    Args:
        rows: A row per way to train.
        columns: Terminal width; None for no limit.
    """
    network = rows[0].traffic.network
    inside, between = network.inside, network.between
    kinds = list(dict.fromkeys(flow.kind for row in rows for flow in row.traffic.flows))
    unit = unit_for(float(row.traffic.sent) for row in rows)
    head = ["model", "stage", "N", "K", "calls", *kinds, f"total {unit[0]}"]
    head += [inside, between, f"a {between}"]
    table = [head]
    for row in rows:
        traffic = row.traffic
        by_kind = {kind: sum(links.values()) for kind, links in traffic.by_kind().items()}
        table.append(
            [
                row.model,
                str(row.stage),
                f"{row.ranks:,}",
                str(row.redundancy),
                f"{sum(flow.calls for flow in traffic.flows):,}",
                *(in_unit(by_kind.get(kind, 0), unit) for kind in kinds),
                in_unit(float(traffic.sent), unit),
                in_unit(float(traffic.sent_over(inside)), unit),
                in_unit(float(traffic.sent_over(between)), unit),
                in_unit(float(traffic.sent_per_card), unit),
            ]
        )
    return "\n".join(
        [
            f"Bytes that one rank sends in a step, in {unit[0]}{_size_of(unit)}; rings are laid "
            f"out {network.ring}.",
            f"Nodes of {network.ranks_per_node} ranks; {inside}: within a node; {between}: between "
            f"nodes, {network.cards} per node.",
            f"{inside} and {between}: mean over ranks; `a {between}`: bytes that leave a node by "
            f"each card.",
            *_through_first(rows, unit),
            "",
            fitted(table, columns=columns),
        ]
    )


def _through_first(rows: Sequence[TrafficRow], unit: tuple[str, int]) -> Iterator[str]:
    """Yield a line for each row in which the first rank adds for all ranks."""
    for row in rows:
        if row.traffic.through_first:
            yield (
                f"{row.model}: the first rank adds for all ranks; "
                f"{in_unit(row.traffic.through_first, unit)} {unit[0]} pass through it."
            )


def _categories(held: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the categories with a nonzero amount in any row, in their given order."""
    return [
        name
        for name in dict.fromkeys(n for each in held for n in each)
        if any(each.get(name) for each in held)
    ]


def _size_of(unit: tuple[str, int]) -> str:
    zeros = len(str(unit[1])) - 1
    return f" (10^{zeros} bytes)" if zeros else ""
