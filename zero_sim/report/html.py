"""Findings as a self-contained HTML page, without scripts, fonts or external resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from zero_sim.bundle import Bundle
from zero_sim.findings.compare import find_difference
from zero_sim.report import pages
from zero_sim.report.calls import calls_near, observed_grads
from zero_sim.report.commands import replay_command
from zero_sim.report.explain import EXPLANATIONS
from zero_sim.report.html_calls import calls_table, near_calls
from zero_sim.report.svg_buffer_map import buffer_map_pictures
from zero_sim.report.svg_lanes import draw_lanes
from zero_sim.report.svg_timeline import draw_timeline
from zero_sim.report.text import render_finding, render_location
from zero_sim.report.text_buffer_map import describe_buffer_map, describe_spread, equal_elems
from zero_sim.scenario.dump import to_chosen_toml, to_toml

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.findings.records import BufferMap, Evidence, Finding

VALUES_BEFORE = 8
VALUES_AFTER = 40
"""Number of elements to show from the first difference on."""
# Bundles may come from strangers. `pages` escapes their contents. If that failed, this policy would
# still forbid loading or running anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(path: Path, bundles: Sequence[Bundle], *, bundles_folder: Path | None) -> None:
    """Write the page.

    Args:
        path: The file; an existing one is replaced.
        bundles: Bundles to show.
        bundles_folder: Their folder; None for the default folder.

    Raises:
        UsageError: The file cannot be written.
        EnvironmentProblem: The disk is full.
    """
    pages.write_page(path, render_page(bundles, bundles_folder=bundles_folder))


def render_page(bundles: Sequence[Bundle], *, bundles_folder: Path | None = None) -> str:
    """Render the page; arguments as for `write_page`."""
    page = pages.render(
        "report.html",
        title=f"{len(bundles)} failed case{'' if len(bundles) == 1 else 's'}",
        policy=_POLICY,
        cases=[_case(bundle, bundles_folder=bundles_folder) for bundle in bundles],
    )
    return str(page)


def _case(bundle: Bundle, *, bundles_folder: Path | None) -> dict[str, object]:
    first, ran = bundle.findings[0], bundle.ran
    # The page leads with the first finding. The template shows the others in short.
    return {
        "bundle": bundle,
        "where": render_location(first),
        "first": render_finding(first),
        "strip": None if bundle.strip is None else _strip(bundle.strip, first),
        "calls": _calls(bundle),
        "tables": list(_values(bundle)),
        "others": "\n\n".join(render_finding(finding) for finding in bundle.findings[1:]),
        "replay": replay_command(
            bundle.id, bundles=bundles_folder, target=ran.target, device=ran.device_named
        ),
        "chosen_toml": to_chosen_toml(bundle.scenario),
        "toml": to_toml(bundle.scenario),
        "explanation": EXPLANATIONS.get(first.check),
    }


def _strip(buffer_map: BufferMap, first: Finding) -> dict[str, object]:
    of = "" if buffer_map.check == first.check else f"{buffer_map.check}: "
    spread = cut = ""
    equal = equal_elems(buffer_map)
    # If nearly all elements differ, their positions show nothing, so describe them in words.
    if equal is not None and equal < len(buffer_map.pieces):
        spread = describe_spread(buffer_map)
    elif (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        cut = f"Shown: elements [{buffer_map.start:,}, {buffer_map.stop:,}):"
    return {
        "sentence": f"{of}{describe_buffer_map(buffer_map)}",
        "spread": spread and f"{spread[0].upper()}{spread[1:]}.",
        "cut": cut,
        "pictures": buffer_map_pictures(buffer_map),
    }


def _calls(bundle: Bundle) -> dict[str, object] | None:
    if not bundle.logs or not bundle.logs[-1].collectives:
        return None
    # Findings end a run, so the first finding is in the last world.
    first, log = bundle.findings[0], bundle.logs[-1]
    shows_grads = observed_grads(bundle.notes)
    nearby = calls_near(log, first, bundle.strip, shows_grads=shows_grads)
    suspects = () if nearby is None else [call.index for call in nearby.suspects]
    picture, timeline_of = draw_timeline(log, first, suspects=suspects)
    table, table_of = calls_table(log, first)
    world = f" of world {len(bundle.logs)} of {len(bundle.logs)}" if len(bundle.logs) > 1 else ""
    return {
        "lanes": draw_lanes(log, first),
        "near": near_calls(log, first, bundle.strip, shows_grads=shows_grads),
        "timeline": picture,
        "timeline_of": f"{timeline_of}{world}",
        "table": table,
        "table_of": table_of,
    }


def _values(bundle: Bundle) -> Iterator[tuple[str, Markup]]:
    """Yield title and table for each finding with values."""
    for finding in bundle.findings:
        evidence = finding.evidence
        if evidence is not None and evidence.expected.numel():
            rank = "" if finding.rank is None else f"rank {finding.rank}, "
            param = "" if finding.param is None else f", {finding.param}"
            title = f"{rank}{finding.check}: {finding.message}{param}"
            yield title, values_table(finding, evidence)


def values_table(finding: Finding, evidence: Evidence) -> Markup:
    """Render a table of expected and observed values around the first difference."""
    differ, first = _differing(evidence)
    # Offsets refer to the evidence, which may be a part of a larger tensor.
    start = max(0, first - VALUES_BEFORE)
    stop = first + VALUES_AFTER
    expected, got = _numbers(evidence.expected[start:stop]), _numbers(evidence.got[start:stop])
    rows = []
    for i, (wanted, came) in enumerate(zip_longest(expected, got), start=start):
        of_param = finding.offset_in_param
        flat = finding.flat_offset
        cells = [
            str(evidence.start + i),
            "" if of_param is None else str(of_param - first + i),
            "" if flat is None else str(flat - first + i),
            *("" if value is None else repr(value) for value in (wanted, came)),
            # Hex floats show all bits, while decimals of different values may look equal.
            *(float(value).hex() if isinstance(value, float) else "" for value in (wanted, came)),
        ]
        rows.append(("bad" if i in differ else "", cells))
    head = ("element", "of param", "of buffer", "expected", "got", "expected bits", "got bits")
    return pages.render("table.html", head=head, rows=rows)


def _differing(evidence: Evidence) -> tuple[frozenset[int], int]:
    """Return the differing indices in the evidence, and the first of them."""
    expected, got = evidence.expected, evidence.got
    # Tensors of different dtype or length cannot be compared, so mark nothing.
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        return frozenset(), 0
    difference = find_difference(expected, got)
    if difference is None:
        return frozenset(), 0
    spans = difference.spans
    return frozenset(i for a, b in spans for i in range(a, b)), difference.first


def _numbers(part: Tensor) -> list[float | int | bool]:
    # float64 represents every value of the narrower dtypes exactly.
    return part.double().tolist() if part.is_floating_point() else part.tolist()
