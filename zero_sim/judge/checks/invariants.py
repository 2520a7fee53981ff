"""Invariants that hold whatever the numbers are; none of them needs the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from zero_sim.findings.phase import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.targets import CompletedEngine, Place


def check_ownership(
    replicas: Sequence[Mapping[int, Sequence[Place]]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    step: int,
) -> Iterator[Finding]:
    """Check that the ranks of every replica own each element exactly once between them.

    Args:
        replicas: What each rank owns, by rank, for each replica of the optimizer state.
        shapes: Shape of every trainable param.
        step: The step that comes next, for the finding.
    """
    for places in replicas:
        owned = [(rank, place) for rank in sorted(places) for place in places[rank]]
        for finding in _check_cover(owned, shapes=shapes):
            yield replace(finding, step=step)


def check_held(
    names: Mapping[int, Iterable[str]], *, held: Sequence[Collection[str]], step: int
) -> Iterator[Finding]:
    """Check that no rank holds a param that is not its own to train, such as another's expert.

    Args:
        names: Names of the params that each rank has, by rank.
        held: Names of those that it is to have, in rank order.
        step: The step that comes next, for the finding.
    """
    for rank in sorted(names):
        for name in names[rank]:
            if name not in held[rank]:
                yield replace(
                    _ownership(name, 0, "this rank holds a param that is not among its own"),
                    step=step,
                    rank=rank,
                )


def check_start(starts: Mapping[int, Mapping[str, str]], *, step: int) -> Iterator[Finding]:
    """Check that ranks which hold the same param or buffer begin with the same values of it.

    Args:
        starts: By rank and name, a digest of what the rank has.
        step: The step that comes next, for the finding.
    """
    first: dict[str, int] = {}
    for rank in sorted(starts):
        for name, digest in starts[rank].items():
            holder = first.setdefault(name, rank)
            if digest != starts[holder][name]:
                yield Finding(
                    check=Check.INVARIANT_START,
                    step=step,
                    rank=rank,
                    param=name,
                    message=f"before the step this rank has other values of it than rank {holder}",
                )


def _check_cover(
    owned: Sequence[tuple[int, Place]], *, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Finding]:
    by_param: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    for rank, place in owned:
        by_param.setdefault(place.param, []).append((place.start, place.stop, rank))
    for name, spans in by_param.items():
        numel = prod(shapes.get(name, (0,)))
        for start, stop, ranks in _stretches(spans, numel=numel):
            if len(ranks) != 1:
                of = "" if ranks else f" of {numel}"
                says = f"elements [{start}, {stop}){of} belong to {_owners(ranks)}"
                yield _ownership(name, start, says, stop=stop)
        last, rank = max(((stop, rank) for _, stop, rank in spans), default=(0, 0))
        if last > numel:
            says = f"rank {rank} owns elements up to {last} of a param with {numel}"
            yield _ownership(name, numel, says)


def _stretches(
    spans: Iterable[tuple[int, int, int]], *, numel: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the elements of a param in stretches, each with the ranks that own it.

    Args:
        spans: Start, stop and rank of each part.
        numel: Number of elements.
    """
    edges: dict[int, list[tuple[bool, int]]] = {0: [], numel: []}
    for start, stop, rank in spans:
        if start < min(stop, numel):
            edges.setdefault(start, []).append((True, rank))
            edges.setdefault(min(stop, numel), []).append((False, rank))
    found: list[tuple[int, int, tuple[int, ...]]] = []
    owners: list[int] = []
    for start, stop in pairwise(sorted(edges)):
        for begins, rank in edges[start]:
            if begins:
                owners.append(rank)
            else:
                owners.remove(rank)
        ranks = tuple(sorted(owners))
        before = found.pop() if found and found[-1][2] == ranks else (start, start, ranks)
        found.append((before[0], stop, ranks))
    return found


def _owners(ranks: Sequence[int]) -> str:
    """Return the owners of elements that are not owned once, in words."""
    each = sorted(set(ranks))
    if not each:
        return "no rank"
    if len(each) == 1:
        return f"rank {each[0]} twice"
    return f"ranks {', '.join(map(str, each[:-1]))} and {each[-1]}"


def _ownership(param: str, offset: int, message: str, *, stop: int | None = None) -> Finding:
    return Finding(
        check=Check.INVARIANT_OWNERSHIP,
        message=message,
        step=0,
        phase=Phase.FORWARD,
        param=param,
        offset_in_param=offset,
        differ_spans=() if stop is None else ((offset, stop),),
    )


def check_same_places(
    before: Sequence[Place], now: Sequence[Place], *, step: int, rank: int
) -> Iterator[Finding]:
    """Check that a rank still owns what it owned at the start: what is not told is not compared."""
    if before != now:
        gone = sorted({place.param for place in before} - {place.param for place in now})
        yield Finding(
            check=Check.INVARIANT_OWNERSHIP,
            message=f"this rank owned {len(before)} parts at the start and {len(now)} now"
            + (f"; gone: {', '.join(gone)}" if gone else ""),
            step=step,
            phase=Phase.FORWARD,
            rank=rank,
        )


def check_zero_gradients(engine: CompletedEngine, *, step: int, rank: int) -> Iterator[Finding]:
    """Check that gradient buffers are zero before the first micro-batch of a step."""
    where = engine.stray_gradients(padding_only=False)
    if where:
        yield Finding(
            check=Check.INVARIANT_ZERO_GRADIENTS,
            step=step,
            rank=rank,
            phase=Phase.FORWARD,
            message=f"gradients are not zero before the first micro-batch: {where}",
        )


def check_padding(engine: CompletedEngine, *, step: int, rank: int) -> Iterator[Finding]:
    """Check that the padding of gradient buffers is still zero after a step."""
    where = engine.stray_gradients(padding_only=True)
    if where:
        yield _written_padding("a gradient buffer", where, step=step, rank=rank, phase=Phase.REDUCE)


def check_param_padding(engine: CompletedEngine, *, step: int, rank: int) -> Iterator[Finding]:
    """Check that the padding of param buffers and master shards is still zero after a step."""
    where = engine.stray_padding()
    if where:
        yield _written_padding("params or masters", where, step=step, rank=rank, phase=Phase.GATHER)


def _written_padding(what: str, where: str, *, step: int, rank: int, phase: Phase) -> Finding:
    return Finding(
        check=Check.INVARIANT_PADDING,
        step=step,
        rank=rank,
        phase=phase,
        message=f"padding of {what} was written: {where}",
    )
