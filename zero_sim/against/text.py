"""Text, JSON and JUnit XML of a verdict on a script."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zero_sim.against.account import Account, Feed
from zero_sim.against.measure import LIMIT
from zero_sim.against.points import MOMENTS
from zero_sim.against.records import EXIT_STATUS, AgainstVerdict
from zero_sim.report.junit import TestCase
from zero_sim.report.schemas import DIALECT, VERSION, Node, list_of, object_of, record_schema
from zero_sim.report.text_buffer_map import describe_spread, draw_buffer_map, equal_elems, in_runs

NAMES_SHOWN = 4
_UNFED = "no collective of this rank wrote these values"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Verdict, with the data to report it."""

    verdict: AgainstVerdict
    account: Account | None
    command: str
    """Command to repeat the judgement."""
    seconds: float
    bundle: str | None = None
    """Bundle id; None if no bundle was written."""


def headline(verdict: AgainstVerdict) -> str:
    """Return the verdict in one line."""
    label = verdict.outcome.replace("-", " ").upper()
    if verdict.outcome == "different" and verdict.differences:
        return f"{label}: first at {verdict.first}"
    if verdict.outcome == "equal":
        return (
            f"{label} up to rounding: {verdict.got} against {verdict.expected}, "
            f"{verdict.compared_count:,} tensors of {verdict.steps} steps, largest difference "
            f"{verdict.largest_multiple:.1f} times rounding (limit {LIMIT:,.0f})"
        )
    return f"{label}: {verdict.reason}"


def render(verdict: AgainstVerdict, account: Account | None) -> str:
    """Return the verdict and its account as lines of text."""
    lines = [headline(verdict)]
    if account is not None:
        lines += [f"  {line}" for line in _account(verdict, account)]
    if verdict.unobserved:
        lines.append(f"  not observed: {_listed(verdict.unobserved)}")
    if verdict.undecided:
        lines.append(
            f"  undecided, because rounding alone changes it: {_listed(verdict.undecided)}"
        )
    lines += [f"  note: {note}" for note in verdict.notes]
    if verdict.ending:
        lines += [f"  {line}" for line in verdict.ending.splitlines()]
    if verdict.remedy:
        lines.append(f"  {verdict.remedy}")
    return "\n".join(lines)


def _account(verdict: AgainstVerdict, account: Account) -> list[str]:
    first = verdict.differences[0]
    lines = [
        f"{_ranks(account, first.measured.kind)}: off by {_percent(first.measured.relative)} of "
        f"the largest value; rounding explains up to {_percent(first.rounding * LIMIT)}",
        f"{account.differ_count:,} of {account.elems:,} elements differ; element "
        f"{account.element}: expected {account.expected:.9g}, got {account.got:.9g}",
    ]
    # Sentences, so that each begins with a capital letter.
    lines += [f"{manner[0].upper()}{manner[1:]}." for manner in account.manners]
    if account.is_unreduced and not account.is_alike and not account.manners:
        lines.append("Its gradient is not reduced: the mean over ranks is right.")
    lines += [] if first.point.moment == "setting" else _fed(account.feeds)
    if account.beside:
        lines.append(f"{len(account.beside)} more at the same point: {_listed(account.beside)}")
    if account.later_count:
        lines.append(f"{account.later_count:,} more later, perhaps as a consequence")
    # A picture of a tensor that differs everywhere shows nothing.
    if equal_elems(account.picture) != 0:
        lines += draw_buffer_map(account.picture)[1:]
    elif len(account.picture.shards) > 1:
        lines.append(describe_spread(account.picture))
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _ranks(account: Account, kind: str) -> str:
    ranks, world = account.ranks, account.world_size
    if not ranks:
        return f"the shards of {world} ranks, assembled"
    if kind == "sharded":
        return f"shards of {_named(ranks)}"
    if len(ranks) < world:
        return f"{_named(ranks)} of {world}"
    if world == 1:
        return "the only rank"
    return f"all {world} ranks, {'in the same way' if account.is_alike else 'each in its own way'}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {in_runs(ranks)}"


def _fed(feeds: Sequence[Feed]) -> list[str]:
    """Return one line per feeding call, with the ranks it fed."""
    ranks: dict[str, list[int]] = {}
    for feed in feeds:
        # Equal to 1 within the accuracy of the search.
        times = "" if abs(feed.factor - 1) < 1e-9 else f", times {feed.factor:.6g}"
        line = f"fed by {feed.call}, from its element {feed.start} on{times}"
        ranks.setdefault(line if feed.call else _UNFED, []).append(feed.rank)
    return [f"{_named(fed)}: {line}" for line, fed in ranks.items()]


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def as_dict(reported: Reported) -> dict[str, object]:
    """Return a verdict as a dict for JSON. Infinity becomes None."""
    verdict, account = reported.verdict, reported.account
    differences = [
        {
            "step": each.point.step,
            "moment": each.point.moment,
            "tensor": each.point.name,
            "relative": _finite(each.measured.relative),
            "multiple_of_rounding": _finite(each.multiple),
        }
        for each in verdict.differences
    ]
    return {
        **{each.name: getattr(verdict, each.name) for each in dataclasses.fields(verdict)},
        "largest_multiple": _finite(verdict.largest_multiple),
        "differences": differences,
        "first": None if account is None else dataclasses.asdict(account),
        "command": reported.command,
        "bundle": reported.bundle,
        "seconds": reported.seconds,
        "exit_status": EXIT_STATUS[verdict.outcome],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def verdicts_schema() -> dict[str, object]:
    """Return the JSON Schema of the file written by `zero-sim torchrun --against --json`."""
    number: Node = {"type": ["number", "null"], "description": "Null if infinite."}
    difference: dict[str, Node] = {
        "step": {"type": "integer", "minimum": 0},
        "moment": {"enum": list(MOMENTS)},
        "tensor": {"type": "string"},
        "relative": number,
        "multiple_of_rounding": number,
    }
    fields: dict[str, Node] = {
        **record_schema(AgainstVerdict)["properties"],
        "largest_multiple": number,
        "differences": list_of(object_of(difference)),
        "first": {"anyOf": [record_schema(Account), {"type": "null"}]},
        "command": {"type": "string"},
        "bundle": {"type": ["string", "null"], "description": "Id of the bundle."},
        "seconds": {"type": "number", "minimum": 0},
        "exit_status": {"enum": sorted(EXIT_STATUS.values())},
    }
    whole = object_of({"schema": {"const": VERSION}, "verdicts": list_of(object_of(fields))})
    return {"$schema": DIALECT, "title": "zero-sim torchrun --against --json", **whole}


def junit_case(reported: Reported) -> TestCase:
    """Return a verdict as a JUnit test. Inconclusive and unsupported verdicts are errors."""
    verdict = reported.verdict
    outcome = {"equal": "passed", "different": "failure"}.get(verdict.outcome, "error")
    return TestCase(
        name=f"{verdict.got} against {verdict.expected}",
        source=reported.command,
        seconds=reported.seconds,
        outcome=outcome,
        kind=f"zero_sim.against.{verdict.outcome}",
        message=headline(verdict),
        text=render(verdict, reported.account),
        properties={
            "compared_tensors": str(verdict.compared_count),
            "largest_multiple_of_rounding": f"{verdict.largest_multiple:.3g}",
        },
    )
