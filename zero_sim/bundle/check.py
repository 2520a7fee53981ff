"""Checks across the parts of a bundle: numbers lie within the case, and parts fit each other.

A hash proves nothing here, because the author of a bundle can write any hash into it. So each part
is checked against the case and the other parts. Code that shows or replays a bundle need not check
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

# Ids of checks are printed and used in file names, so nothing else may pass.
_CHECK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)?")
_CHECK_CHARS_MAX = 80


def integers(value: object, *, stop: int, where: str) -> list[int]:
    """Check that a value is a list of integers from 0 to `stop - 1`, and return it.

    Raises:
        InvalidField: If it is not.
    """
    if not isinstance(value, list):
        raise InvalidField(f"{where}: expected a list, got {show(value)}")
    for index, item in enumerate(value):
        # `type` and not `isinstance`, because JSON's true is an instance of int.
        if type(item) is not int or not 0 <= item < stop:
            raise InvalidField(f"{where}[{index}]: expected 0 to {stop - 1}, got {show(item)}")
    return value


def world_sizes(scenario: Scenario) -> tuple[int, ...]:
    """Return the number of ranks of each world in which a case runs: one, or two with a reload."""
    if scenario.reload is None:
        return (scenario.world.size,)
    return scenario.world.size, scenario.reload.world_size or scenario.world.size


def check_case(text: str, scenario: Scenario, *, seed: int) -> None:
    """Check that the readable case file describes the case that a replay runs.

    Args:
        text: Content of the case file.
        scenario: The case itself.
        seed: The seed beside it.

    Raises:
        InvalidField: If one of them was changed.
    """
    if seed != scenario.run.seed:
        raise InvalidField(
            f"seed: expected {scenario.run.seed}, the scenario's, got {seed}: the bundle was "
            "changed after it was written"
        )
    try:
        (written,) = parse_cases(text, source="case.toml", stem="case")
    # ValueError: a file with several cases does not unpack into one.
    except (ScenarioError, ValueError) as error:
        first = str(error).splitlines()[-1].strip()
        raise InvalidField(f"case.toml: expected the case of this bundle, got: {first}") from None
    # Names are excluded: that of a case file comes from the file.
    if _anonymous(written) != _anonymous(scenario):
        raise InvalidField(
            "case.toml: expected the case of bundle.json, got another one: the bundle was changed "
            "after it was written. To change a case, edit a copy of the file elsewhere"
        )


def check_finding(finding: Finding, *, where: str, rank_stop: int) -> None:
    """Check a finding by itself.

    Args:
        finding: The finding as read.
        where: Position in the file, for the message.
        rank_stop: One past the last rank of the largest world.

    Raises:
        InvalidField: If a name or number is impossible for a finding.
    """
    if not _CHECK.fullmatch(finding.check) or len(finding.check) > _CHECK_CHARS_MAX:
        raise InvalidField(
            f"{where}.check: expected the name of a check, got {finding.check[:80]!r}"
        )
    if finding.rank is not None:
        integers([finding.rank], stop=rank_stop, where=f"{where}.rank")
    _check_spans(finding.differ_spans, where=f"{where}.differ_spans")


def check_buffer_map(buffer_map: BufferMap, *, rank_stop: int) -> None:
    """Check a buffer map by itself.

    Raises:
        InvalidField: If a part lies outside the buffer, or a rank outside the world.
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
            raise InvalidField("strip.shards: expected a rank or more for each, got none")
        integers(list(shard.ranks), stop=rank_stop, where="strip.shards")
    for name in ("buckets", "shards", "pieces"):
        spans = [(part.start, part.stop) for part in getattr(buffer_map, name)]
        _check_spans(spans, where=f"strip.{name}")
    for name in ("padding", "unowned", "differ"):
        _check_spans(getattr(buffer_map, name), where=f"strip.{name}")


def check_evidence(evidence: Evidence, *, where: str) -> None:
    """Check the tensors of a comparison.

    Raises:
        InvalidField: If the sides are not such as a comparison keeps.
    """
    sides = evidence.expected, evidence.got
    # Readers compare the sides element by element.
    for side in sides:
        # The writer keeps flat windows around the first difference.
        if side.ndim != 1 or side.numel() > EVIDENCE_ELEMS_MAX:
            raise InvalidField(
                f"{where}: expected tensors of one dimension, of at most {EVIDENCE_ELEMS_MAX} "
                f"elements, got shape {tuple(side.shape)}"
            )
        # torch cannot subtract bools, and complex numbers have no order.
        if side.is_complex() or side.dtype == torch.bool:
            raise InvalidField(f"{where}: expected tensors of numbers, got {_dtype(side)}")
    if sides[0].dtype != sides[1].dtype or sides[0].numel() != sides[1].numel():
        got = " and ".join(f"{side.numel()} of {_dtype(side)}" for side in sides)
        raise InvalidField(f"{where}: expected two sides of one length and dtype, got {got}")


def check_moment(moment: Moment, log: EventLog, *, where: str) -> None:
    """Check a moment against its call and the previous moment.

    Raises:
        InvalidField: If there is no such call, it has another rank, or time runs backwards.
    """
    integers([moment.record], stop=len(log.collectives), where=f"{where}.record")
    rank = log.collectives[moment.record].rank
    if moment.rank != rank:
        raise InvalidField(f"{where}.rank: expected {rank}, the call's, got {moment.rank}")
    # Ticks count calls into the world, so they never decrease.
    # Timelines compute durations from ticks, which must not be negative.
    least = log.moments[-1].tick if log.moments else 0
    if moment.tick < least:
        raise InvalidField(f"{where}.tick: expected at least {least}, got {moment.tick}")


def check_logs(logs: Sequence[EventLog], scenario: Scenario) -> None:
    """Check that there are no more logs than worlds of the case.

    Raises:
        InvalidField: If there are more.
    """
    most = len(world_sizes(scenario))
    if len(logs) > most:
        raise InvalidField(
            f"worlds: expected at most {most}, the worlds of the case, got {len(logs)}"
        )


def _anonymous(scenario: Scenario) -> Scenario:
    return dataclasses.replace(scenario, name="", description="")


def _check_spans(spans: Sequence[tuple[int, int]], *, where: str) -> None:
    for start, stop in spans:
        # Equal ends are allowed: a rank may have an empty shard.
        if start > stop:
            raise InvalidField(f"{where}: expected spans, got [{start}, {stop})")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
