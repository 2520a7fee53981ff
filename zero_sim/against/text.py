"""A verdict on a script as text, JSON, JUnit XML and a page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_sim.against.account import Account, Feed
from zero_sim.against.measure import LIMIT
from zero_sim.against.points import MOMENTS
from zero_sim.against.verdict import EXIT_STATUS, AgainstVerdict
from zero_sim.report.junit import TestCase
from zero_sim.report.schemas import DIALECT, VERSION, record_schema
from zero_sim.report.text_buffer_map import describe_spread, draw_buffer_map, equal_elems

NAMES_SHOWN = 4
_UNFED = "no collective of this rank wrote these values"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """A verdict with all that is reported about it."""

    verdict: AgainstVerdict
    account: Account | None
    command: str
    """The command that judges again."""
    seconds: float
    bundle: str | None = None
    """Id of its bundle, if one was written."""


def headline(verdict: AgainstVerdict) -> str:
    """The verdict in one line."""
    label = verdict.outcome.replace("-", " ").upper()
    if verdict.outcome == "different" and verdict.differences:
        return f"{label}: first at {verdict.differences[0].point.text}"
    if verdict.outcome == "equal":
        return (
            f"{label} up to rounding: {verdict.got} against {verdict.expected}, "
            f"{verdict.compared_count:,} tensors of {verdict.steps} steps, largest difference "
            f"{verdict.largest_multiple:.1f} times rounding (limit {LIMIT:.0e})"
        )
    return f"{label}: {verdict.reason}"


def render(verdict: AgainstVerdict, account: Account | None) -> str:
    """Everything about a verdict, line by line."""
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
    first = account.difference
    sizes = (
        f"{first.measured.relative:.1e} of the largest value, {first.multiple:.0e} x rounding "
        f"(limit {LIMIT:.0e})"
    )
    lines = [f"{_ranks(account)}: {sizes}"]
    lines.append(
        f"{account.differ_count:,} of {account.elems:,} elements differ; element "
        f"{account.element}: expected {account.expected:.9g}, got {account.got:.9g}"
    )
    lines += [f"{manner[0].upper()}{manner[1:]}." for manner in account.manners]
    if account.is_unreduced and not account.is_alike and not account.manners:
        lines.append("Its gradient is not reduced: the mean over ranks is right.")
    lines += [] if first.point.moment == "setting" else _fed(account.feeds)
    if account.beside:
        lines.append(f"at the same point {len(account.beside)} more: {_listed(account.beside)}")
    if account.later_count:
        lines.append(f"later {account.later_count:,} more, perhaps as a consequence")
    return lines + _picture(account)


def _picture(account: Account) -> list[str]:
    if equal_elems(account.picture) == 0:
        several = len(account.picture.shards) > 1
        return [describe_spread(account.picture)] if several else []
    return draw_buffer_map(account.picture)[1:]


def _ranks(account: Account) -> str:
    world = account.world_size
    if not account.ranks:
        return f"the shards of {world} ranks, put together"
    if account.difference.measured.kind == "sharded":
        return f"shards of {_numbers('rank', account.ranks)}"
    if len(account.ranks) < world:
        return f"{_numbers('rank', account.ranks)} of {world}"
    return f"all {world} ranks, {'in the same way' if account.is_alike else 'each in its own way'}"


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"


def _fed(feeds: Sequence[Feed]) -> list[str]:
    """A line for each call that fed the tensor, with the ranks that it fed."""
    ranks: dict[str, list[int]] = {}
    for feed in feeds:
        times = "" if abs(feed.factor - 1) < 1e-9 else f", times {feed.factor:.6g}"
        line = f"fed by {feed.call}, from its element {feed.start} on{times}"
        ranks.setdefault(line if feed.call else _UNFED, []).append(feed.rank)
    return [f"{_numbers('rank', sorted(held))}: {line}" for line, held in ranks.items()]


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def as_dict(reported: Reported) -> dict[str, object]:
    """A verdict, ready for JSON."""
    verdict, account = reported.verdict, reported.account
    facts = {} if account is None else dataclasses.asdict(account)
    first = {key: _plain(value) for key, value in facts.items() if key != "difference"} or None
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
    rest = {
        field.name: _plain(getattr(verdict, field.name))
        for field in dataclasses.fields(verdict)
        if field.name != "differences"
    }
    return {
        **rest,
        "largest_multiple": _finite(verdict.largest_multiple),
        "differences": differences,
        "first": first,
        "command": reported.command,
        "bundle": reported.bundle,
        "seconds": reported.seconds,
        "exit_status": EXIT_STATUS[verdict.outcome],
    }


def verdicts_schema() -> dict[str, object]:
    """The JSON Schema of the file that `zero-sim torchrun --against` writes with `--json`."""
    number: dict[str, object] = {"type": ["number", "null"], "description": "Null if infinite."}
    difference = {
        "step": {"type": "integer", "minimum": 0},
        "moment": {"enum": list(MOMENTS)},
        "tensor": {"type": "string"},
        "relative": number,
        "multiple_of_rounding": number,
    }
    fields = {
        **record_schema(AgainstVerdict)["properties"],
        "largest_multiple": number,
        "differences": {"type": "array", "items": _object(difference)},
        "first": {"anyOf": [_without(record_schema(Account), "difference"), {"type": "null"}]},
        "command": {"type": "string"},
        "bundle": {"type": ["string", "null"], "description": "Id of its bundle."},
        "seconds": {"type": "number", "minimum": 0},
        "exit_status": {"enum": sorted(EXIT_STATUS.values())},
    }
    verdicts = {"type": "array", "items": _object(fields)}
    whole = _object({"schema": {"const": VERSION}, "verdicts": verdicts})
    return {"$schema": DIALECT, "title": "zero-sim torchrun --against --json", **whole}


def _object(properties: Mapping[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _without(node: Mapping[str, object], field: str) -> dict[str, object]:
    properties = dict(node["properties"])  # pyrefly: ignore [no-matching-overload]
    del properties[field]
    return _object(properties)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: object) -> object:
    """JSON has no infinity, and tuples are lists there."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def junit_case(reported: Reported) -> TestCase:
    """A verdict as one test: inconclusive and unsupported ones are errors."""
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
