"""Checks across the parts of a bundle: numbers are in range, and parts fit each other.

A hash proves nothing here, because a bundle's author can write any hash into it. So each part is
checked against the case and the other parts. Code that shows or replays a bundle need not check
again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_sim.errors import ScenarioError
from zero_sim.findings.describe import EVIDENCE_ELEMS_MAX
from zero_sim.findings.records import BufferMap, Evidence, Finding
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.sim import EventLog, Moment
from zero_sim.untrusted_json import InvalidField, show

# Check ids are printed and used in file names, so allow no other characters.
_CHECK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)?")
_CHECK_CHARS_MAX = 80


def integers(value: object, *, stop: int, where: str) -> list[int]:
    """Return a value if it is a list of integers from 0 to `stop - 1`.

    Raises:
        InvalidField: It is not.
    """
    if not isinstance(value, list):
        raise InvalidField(f"{where}: expected a list, got {show(value)}")
    for index, item in enumerate(value):
        # Not isinstance, because JSON's true is an int to Python.
        if type(item) is not int or not 0 <= item < stop:
            raise InvalidField(f"{where}[{index}]: expected 0 to {stop - 1}, got {show(item)}")
    return value


def world_sizes(scenario: Scenario) -> tuple[int, ...]:
    """Return the sizes of a case's worlds: one world, or two with a reload."""
    if scenario.reload is None:
        return (scenario.world.size,)
    return scenario.world.size, scenario.reload.world_size or scenario.world.size


def check_case(text: str, scenario: Scenario, *, seed: int) -> None:
    """Check that the readable case file describes the case that a replay runs.

    Args:
        text: The case file.
        scenario: The case in the bundle's head.
        seed: The seed in the bundle's head.

    Raises:
        InvalidField: They differ, so one of them was changed.
    """
    if seed != scenario.run.seed:
        raise InvalidField(
            f"seed: expected {scenario.run.seed}, as in the scenario, got {seed}: the bundle was "
            "changed after it was written"
        )
    try:
        (written,) = parse_cases(text, source="case.toml", stem="case")
    # A file with several cases raises ValueError, because it does not unpack.
    except (ScenarioError, ValueError) as error:
        first = str(error).splitlines()[-1].strip()
        raise InvalidField(f"case.toml: expected the case of this bundle, got: {first}") from None
    # Ignore names, because the case file's name comes from the file.
    if _anonymous(written) != _anonymous(scenario):
        raise InvalidField(
            "case.toml: expected the case in bundle.json, got another case: the bundle was changed "
            "after it was written. To change a case, edit a copy of the file elsewhere"
        )


def check_finding(finding: Finding, *, where: str, rank_stop: int) -> None:
    """Check names and numbers in a finding.

    Raises:
        InvalidField: A name or number is impossible.
    """
    if not _CHECK.fullmatch(finding.check) or len(finding.check) > _CHECK_CHARS_MAX:
        raise InvalidField(f"{where}.check: expected a check's name, got {finding.check[:80]!r}")
    if finding.rank is not None:
        integers([finding.rank], stop=rank_stop, where=f"{where}.rank")
    _check_spans(finding.differ_spans, where=f"{where}.differ_spans")


def check_buffer_map(buffer_map: BufferMap, *, rank_stop: int) -> None:
    """Check ranges and ranks in a buffer map.

    Raises:
        InvalidField: A range is outside the buffer, or a rank outside the world.
    """
    if not 0 <= buffer_map.start < buffer_map.stop <= buffer_map.elems:
        raise InvalidField(
            f"strip: expected a part of {buffer_map.elems} elements, got "
            f"[{buffer_map.start}, {buffer_map.stop})"
        )
    integers(list(buffer_map.differ_ranks), stop=rank_stop, where="strip.differ_ranks")
    for shard in buffer_map.shards:
        # Pictures label a shard with its first rank.
        if not shard.ranks:
            raise InvalidField("strip.shards: expected at least one rank for each shard, got none")
        integers(list(shard.ranks), stop=rank_stop, where="strip.shards")
    for name in ("buckets", "shards", "pieces"):
        spans = [(part.start, part.stop) for part in getattr(buffer_map, name)]
        _check_spans(spans, where=f"strip.{name}")
    for name in ("padding", "unowned", "differ"):
        _check_spans(getattr(buffer_map, name), where=f"strip.{name}")


def check_evidence(evidence: Evidence, *, where: str) -> None:
    """Check the tensors of a comparison.

    Raises:
        InvalidField: No comparison keeps such tensors.
    """
    sides = evidence.expected, evidence.got
    # Readers compare the sides element by element.
    for side in sides:
        # The writer only keeps flat windows around the first difference.
        if side.ndim != 1 or side.numel() > EVIDENCE_ELEMS_MAX:
            raise InvalidField(
                f"{where}: expected 1D tensors with at most {EVIDENCE_ELEMS_MAX} elements, got "
                f"shape {tuple(side.shape)}"
            )
        # torch cannot subtract bools, and complex numbers have no order.
        if side.is_complex() or side.dtype == torch.bool:
            raise InvalidField(f"{where}: expected tensors of numbers, got {_dtype(side)}")
    if sides[0].dtype != sides[1].dtype or sides[0].numel() != sides[1].numel():
        got = " and ".join(f"{side.numel()} of {_dtype(side)}" for side in sides)
        raise InvalidField(f"{where}: expected two sides of equal length and dtype, got {got}")


def check_moment(moment: Moment, log: EventLog, *, where: str) -> None:
    """Check a moment against its call and the previous moment.

    Raises:
        InvalidField: There is no such call, it has another rank, or time runs backwards.
    """
    integers([moment.record], stop=len(log.collectives), where=f"{where}.record")
    rank = log.collectives[moment.record].rank
    if moment.rank != rank:
        raise InvalidField(f"{where}.rank: expected {rank}, as in the call, got {moment.rank}")
    # Ticks count calls into the world, so they never decrease. Timelines rely on this, because they
    # compute durations from ticks.
    least = log.moments[-1].tick if log.moments else 0
    if moment.tick < least:
        raise InvalidField(f"{where}.tick: expected at least {least}, got {moment.tick}")


def check_logs(logs: Sequence[EventLog], scenario: Scenario) -> None:
    """Check that there are no more logs than the case has worlds.

    Raises:
        InvalidField: There are more.
    """
    most = len(world_sizes(scenario))
    if len(logs) > most:
        raise InvalidField(
            f"worlds: expected at most {most}, because the case has no more worlds, got {len(logs)}"
        )


def _anonymous(scenario: Scenario) -> Scenario:
    return dataclasses.replace(scenario, name="", description="")


def _check_spans(spans: Sequence[tuple[int, int]], *, where: str) -> None:
    for start, stop in spans:
        # Equal ends are allowed, because a rank may have an empty shard.
        if start > stop:
            raise InvalidField(f"{where}: expected spans, got [{start}, {stop})")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
