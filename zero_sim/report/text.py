"""Results as plain ASCII text for terminals and CI logs: pure functions from records to strings."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from zero_sim.report.amounts import aligned, cut_middle
from zero_sim.report.calls import observed_grads, render_calls
from zero_sim.report.text_buffer_map import draw_buffer_map
from zero_sim.scenario.checks import Check
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.bundle import Bundle, Replayed
    from zero_sim.errors import ScenarioError
    from zero_sim.findings.records import BufferMap, CaseResult, Finding
    from zero_sim.report.explain import Explanation
    from zero_sim.shrink import Reduced
    from zero_sim.sim import EventLog

MARKS = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE", "error": "ERROR"}
"""First word of a case's line, by verdict."""

FINDINGS_SHOWN = 5
"""Findings to print in full for a case. The first is nearly always the cause."""
# About two screens. JSON and bundles contain the rest.
DETAIL_LINES_MAX = 60
CASE_LINES_MAX = 40

_STOPPED = {
    "cases": "; stopped by the limit on cases, a smaller one may exist",
    "seconds": "; stopped by the limit on time, a smaller one may exist",
    "interrupt": "; interrupted, a smaller one may exist",
    None: "",
}

# Values that are compared after every step, if reported. In order of computation.
_OBSERVABLE = (
    "losses",
    "reduced gradients",
    "division of gradients",
    "norm",
    "zeros",
    "skipped",
    "masters and optimizer state",
    "working params",
)

_ID_WIDTH_MAX = 72
_ID_CHARS_MIN = 12
_UPDATES = (Check.EQUALITY_STATE, Check.EQUALITY_MASTER, Check.EQUALITY_PARAMS)
_ROUNDING_ULP_MAX = 4
"""Limit for a hint. This is no tolerance: a finding within it is still a finding."""
_TEXT_WIDTH = 100


def count_verdicts(verdicts: Mapping[str, int], *, params_only: int) -> str:
    """Return counts by verdict, such as `17 pass (12 by params only)`; empty without cases.

    Args:
        verdicts: Number of cases by verdict.
        params_only: Number of passes with scope `params-only`.
    """
    counts = {name: f"{count} {name}" for name, count in sorted(verdicts.items())}
    if params_only:
        counts["pass"] += f" ({params_only} by params only)"
    return ", ".join(counts.values())


def id_width(ids: Iterable[str]) -> int:
    """Return the width of a column of case ids, in characters."""
    return min(max((len(case_id) for case_id in ids), default=0), _ID_WIDTH_MAX)


def render_case_line(result: CaseResult, *, width: int = 0, columns: int | None = None) -> str:
    """Return a case's line: mark, id, time, and the amount compared.

    Args:
        result: The result.
        width: Width of the id column.
        columns: Terminal width. Ids are shortened to fit; None for no limit.
    """
    if result.verdict == "error":
        outcome = (result.error.splitlines() or ["not judged"])[0]
    else:
        outcome = f"{_count(result.compared_elems, 'element')} compared"
        if result.collectives:
            outcome += f", {_count(result.collectives, 'collective')}"
    mark = MARKS[result.verdict]
    # Such a pass proves less, so mark it.
    if result.passes_by_params_only:
        mark += " (params only)"
    rest = f"  {result.seconds:>8.3f} s  {outcome}"
    name = printable(result.id)
    if columns is not None:
        # In a very narrow terminal, let the line wrap: a shorter id would be useless.
        room = max(columns - len(f"{mark:<5} {rest}"), _ID_CHARS_MIN)
        name, width = cut_middle(name, room), min(width, room)
    return printable(f"{mark:<5} {name:<{width}}{rest}")


def render_case(
    result: CaseResult,
    *,
    width: int = 0,
    columns: int | None = None,
    case: str = "",
    reproduce: str = "",
    replay: str = "",
    with_notes: bool = True,
) -> str:
    """Return a case's line and report: findings, buffer map, calls, notes and commands.

    Args:
        result: The result. Calls are shown if it has event logs.
        width: Width of the id column.
        columns: Terminal width, for the first line; None for no limit.
        case: The case as TOML, shown if it failed.
        reproduce: Command that runs only this case, shown unless it passed.
        replay: Command that replays exactly this run; may be empty.
        with_notes: True to show notes of a passing case, too.
    """
    lines = [render_case_line(result, width=width, columns=columns)]
    if result.verdict == "error":
        lines.extend(f"      {line}" for line in result.error.splitlines()[1:])
    shown = result.findings[:FINDINGS_SHOWN]
    # Later findings may be consequences of the first, so only the first gets calls and a hint.
    for index, finding in enumerate(shown):
        around = result.logs if index == 0 and result.verdict == "fail" else ()
        block = _finding_lines(finding, result.strip, logs=around, notes=result.notes)
        block += _rounding_hint(finding) if index == 0 else []
        lines.extend(f"  {line}" if line else "" for line in block)
    # After the findings: notes, the case, and commands to reproduce, replay and explain.
    if len(result.findings) > len(shown):
        left = len(result.findings) - len(shown)
        lines.append(f"  and {_count(left, 'more finding')}; --json lists them all")
    if with_notes or result.verdict != "pass":
        lines.extend(f"  note: {note}" for note in result.notes)
    if case and result.verdict == "fail":
        lines.extend(_case_lines(case))
    if reproduce and result.verdict != "pass":
        lines.append(f"  reproduce: {reproduce}")
    if replay:
        lines.append(f"  replay: {replay}")
    if result.findings and result.verdict in ("fail", "inconclusive"):
        lines.append(f"  explain: zero-sim explain {result.findings[0].check}")
    return _text(lines)


def _rounding_hint(finding: Finding) -> list[str]:
    """Return a hint if an update differs from torch's by a few ulp, like another formula."""
    if finding.check not in _UPDATES or finding.ulp is None or "own rule" in finding.detail:
        return []
    if finding.ulp > _ROUNDING_ULP_MAX:
        return []
    return [
        "  hint: a hand-written optimizer may round differently from torch's. If this is yours,",
        "  declare it as `reference_step`: docs/targets.md",
    ]


def _finding_lines(
    finding: Finding,
    buffer_map: BufferMap | None,
    *,
    logs: Sequence[EventLog],
    notes: Sequence[str],
) -> list[str]:
    """Return a finding with its buffer map and the calls around it."""
    lines = render_finding(finding).splitlines()
    if buffer_map is not None and buffer_map.check == finding.check:
        lines.extend(f"  {line}" for line in draw_buffer_map(buffer_map))
    if logs:
        shows_grads = observed_grads(notes)
        # A case with a reload has several worlds. The first finding stopped the last world.
        calls = render_calls(logs[-1], finding, buffer_map, shows_grads=shows_grads)
        lines.extend(f"  {line}" for line in calls)
    return lines


def _case_lines(case: str) -> list[str]:
    own = [line for line in case.splitlines() if line]
    cut = [f"    ... {_count(len(own) - CASE_LINES_MAX, 'more line')}"]
    return [
        "  case:",
        *(f"    {line}" for line in own[:CASE_LINES_MAX]),
        *(cut if len(own) > CASE_LINES_MAX else ()),
    ]


def render_explanation(explanation: Explanation) -> str:
    """Render a check's explanation: meaning, reason, usual causes, next step, public bugs."""
    lines = (
        explanation.check,
        *_paragraph("meaning", explanation.meaning),
        *_paragraph("why", explanation.why),
        *_bullets("causes", explanation.causes),
        *_paragraph("next", explanation.next),
        *_bullets("seen in", explanation.seen_in),
    )
    return "\n".join(lines)


def _bullets(label: str, entries: Sequence[str]) -> list[str]:
    labels = (label, *[""] * len(entries))
    lines = (_paragraph(*each, bullet="- ") for each in zip(labels, entries, strict=False))
    return [line for paragraph in lines for line in paragraph]


def render_bundle(bundle: Bundle) -> str:
    """Render a bundle: its case and its first finding."""
    first = bundle.findings[0]
    lines = [f"bundle {bundle.id}  {bundle.scenario.name}".rstrip()]
    # The bundle's page and JSON contain its other findings.
    block = _finding_lines(first, bundle.strip, logs=bundle.logs, notes=bundle.notes)
    # If the first finding has no position in a buffer, the map belongs to a later finding.
    if bundle.strip is not None and bundle.strip.check != first.check:
        block.append(f"buffer map of {bundle.strip.check}:")
        block.extend(f"  {line}" for line in draw_buffer_map(bundle.strip))
    lines.extend(f"  {line}" if line else "" for line in block)
    return _text(lines)


def _paragraph(label: str, text: str, *, bullet: str = "") -> list[str]:
    first = f"  {label:<9} {bullet}"
    return textwrap.wrap(
        text,
        width=_TEXT_WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )


def render_replay(replayed: Replayed) -> str:
    """Render a replay: FIXED, FAILED or ERROR, and differences from the bundle."""
    result, then = replayed.result, replayed.then
    before = f"{then.check} at {render_location(then)}" if render_location(then) else then.check
    match replayed.outcome:
        case "fixed":
            outcome = f"no finding now; in the bundle: {before}"
        case "failed" if replayed.same:
            events = {True: " after the same events", False: " after different events", None: ""}
            outcome = f"the same first finding{events[replayed.same_events]}"
        case "failed":
            outcome = f"another first finding; in the bundle: {before}"
        case "error" if result.verdict == "inconclusive":
            outcome = "the case is inconclusive now, which does not prove a fix"
        case "error":
            outcome = f"cannot run here: {(result.error.splitlines() or [''])[0]}"
    head = f"{replayed.outcome.upper():<6} {replayed.id}  {result.id}  {result.seconds:.3f} s"
    lines = [f"{head}  {outcome}"]
    lines.extend(f"      {line}" for line in result.error.splitlines()[1:])
    if replayed.now is not None:
        lines.extend(f"  {line}".rstrip() for line in render_finding(replayed.now).splitlines())
    lines.extend(f"  note: {note}" for note in result.notes)
    lines.extend(f"  differs: {difference}" for difference in replayed.differences)
    return _text(lines)


def render_reduced(reduced: Reduced) -> str:
    """Render a case's size before and after shrinking, and the time taken."""
    took = f"{_count(reduced.cases, 'case')}, {reduced.seconds:.1f} s"
    return (
        f"  before      {reduced.before}\n"
        f"  smallest    {reduced.size}; {took}{_STOPPED[reduced.stopped]}"
    )


def render_finding(finding: Finding) -> str:
    """Render a finding as a block of lines."""
    lines = [f"{finding.check}: {finding.message}"]
    place = render_location(finding)
    if place:
        lines.append(f"  at        {place}")
    if finding.expected is not None or finding.expected_value is not None:
        lines.append(f"  expected  {_number(finding.expected, finding.expected_value)}")
    if finding.got is not None or finding.got_value is not None:
        apart = "" if finding.ulp is None else f"   {finding.ulp:,} ulp apart"
        lines.append(f"  got       {_number(finding.got, finding.got_value)}{apart}")
    if finding.differ_count is not None:
        of = "" if finding.compared_count is None else f" of {finding.compared_count:,}"
        word = "element differs" if finding.differ_count == 1 and not of else "elements differ"
        lines.append(f"  extent    {finding.differ_count:,}{of} {word}{_furthest(finding)}")
    detail = finding.detail.splitlines()
    lines.extend(f"    {line}".rstrip() for line in detail[:DETAIL_LINES_MAX])
    if len(detail) > DETAIL_LINES_MAX:
        left = _count(len(detail) - DETAIL_LINES_MAX, "more line")
        lines.append(f"    ... {left}; --json has them all")
    return _text(lines)


def _furthest(finding: Finding) -> str:
    """Describe the largest difference; empty for bounds and values that are not finite."""
    # The first difference, printed above, need not be the largest.
    evidence = finding.evidence
    if evidence is None or finding.ulp is None or evidence.expected.dtype != evidence.got.dtype:
        return ""
    from zero_sim.findings.compare import relative_difference  # Imports torch.

    share = relative_difference(evidence.expected, evidence.got)
    if not math.isfinite(share):
        return ""
    # Evidence only contains a part of a large tensor.
    kept = evidence.expected.numel()
    near = f" of the {kept:,} around the first" if kept < (finding.compared_count or 0) else ""
    return f", by up to {share:.2g} of the largest value{near}"


def render_location(finding: Finding) -> str:
    """Render a location: step, phase, rank, param and index, flat offset, bucket, shard."""
    parts = [
        f"{word} {value}"
        for word, value in (
            ("step", finding.step),
            ("phase", finding.phase),
            ("rank", finding.rank),
        )
        if value is not None
    ]
    if finding.param is not None:
        index = finding.index
        if index is None and finding.offset_in_param is not None:
            index = (finding.offset_in_param,)
        inside = "" if index is None else f"[{', '.join(map(str, index))}]"
        parts.append(f"param '{finding.param}'{inside}")
    if finding.flat_offset is not None:
        parts.append(f"flat offset {finding.flat_offset}")
    if finding.bucket is not None:
        parts.append(f"bucket {finding.bucket}")
    if finding.shard is not None:
        span = ""
        if finding.shard_start is not None and finding.shard_stop is not None:
            span = f" [{finding.shard_start}, {finding.shard_stop})"
        parts.append(f"shard {finding.shard}{span}")
    return ", ".join(parts)


def render_problems(errors: Sequence[ScenarioError]) -> str:
    """Render all problems of invalid scenario files."""
    return "\n".join(str(error) for error in errors)


def render_summary(
    results: Sequence[CaseResult], *, seconds: float, bad_files: int = 0, left_out: int = 0
) -> str:
    """Return the last line: number of cases, counts by verdict, and time.

    Args:
        results: Results of the cases that ran.
        seconds: Time of the whole run.
        bad_files: Number of invalid scenario files.
        left_out: Number of cases not run because of an interrupt.
    """
    counts = Counter(result.verdict for result in results)
    # Passes first, even if there are none. Other verdicts only if they occur.
    parts = [f"{counts['pass']} passed"]
    by_params = sum(result.passes_by_params_only for result in results)
    if by_params:
        parts[0] += f" ({by_params} by params only)"
    for verdict, word in (("fail", "failed"), ("inconclusive", "inconclusive")):
        if counts[verdict]:
            parts.append(f"{counts[verdict]} {word}")
    if counts["error"]:
        parts.append(_count(counts["error"], "error"))
    if left_out:
        parts.append(f"{left_out} not run")
    line = f"{_count(len(results) + left_out, 'case')}: {', '.join(parts)} in {seconds:.1f} s"
    if bad_files:
        line += f"; {_count(bad_files, 'file')} could not be read"
    return line


def render_observed(results: Sequence[CaseResult]) -> str:
    """Render quantities that passing cases did not observe; empty if they observed all.

    Args:
        results: Results of all cases in a run.
    """
    # Only for passing cases, because others print their own notes.
    passed = [result for result in results if result.verdict == "pass"]
    missing = Counter(what for result in passed for what in result.unobserved)
    if not missing:
        return ""
    # In order of computation, then by name.
    names = list(dict.fromkeys((*_OBSERVABLE, *sorted(missing))))
    rows = [("compared", "not observed", f"of {_count(len(passed), 'case')} that passed")]
    rows += [(str(len(passed) - missing[name]), str(missing[name] or ""), name) for name in names]
    return f"Not observed, because the target does not report it:\n{aligned(rows, words=range(4))}"


def _text(lines: Iterable[str]) -> str:
    # ASCII, so that no locale or log viewer can break it. `printable` also keeps foreign strings,
    # such as names, from injecting lines.
    return "\n".join(map(printable, lines))


def _number(bits: str | None, value: str | None) -> str:
    # Exact bits first, then the decimal for the reader.
    if bits is None:
        return value or ""
    return bits if value is None else f"{bits} ({value})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
