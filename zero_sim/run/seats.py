"""Judges and oracles of the cells of a world, seated before its ranks begin."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

from zero_sim.judge.judge import Judge
from zero_sim.judge.known_or_not import AnyReference, take_reference
from zero_sim.run.cells import cells_of
from zero_sim.run.program import Seat, Segment
from zero_sim.targets import Target, numerics_of
from zero_sim.workloads import build_workload, on_device


def take_seats(
    segment: Segment,
    *,
    references: MutableMapping[int, AnyReference],
    target: Target,
    device: str,
    rank: int | None = None,
    calls_made: Callable[[], int] | None = None,
) -> Sequence[Seat]:
    """Seat every cell of a segment's world; their judges share a norm.

    Args:
        segment: The steps to judge, and where.
        references: By number of the cell; those of the world before go on, and all are left here
            for the next one.
        target: The system under test.
        device: Where the references compute.
        rank: The one rank of the world that is shown; all where left out.
        calls_made: As for `Judge`.

    Raises:
        ModelError: The model has nothing to train.
        UsageError: A reference cannot go on in this world.
    """
    numerics, seats = numerics_of(target), []
    for index, cell in enumerate(cells_of(segment.scenario)):
        # What the target computes, in the reference's words; the target gets the case as it is.
        replayed = numerics.replayed(cell.scenario)
        workload = on_device(build_workload(cell.scenario), device)
        reference = references[index] = take_reference(
            replayed,
            before=references.get(index),
            workload=workload,
            uncounted=cell.uncounted,
            weights_only=segment.weights_only,
            norm=numerics.norm,
            clip=numerics.clip,
        )
        shown = None if rank is None else [i for i, each in enumerate(cell.ranks) if each == rank]
        judge = Judge(
            replayed,
            reference=reference,
            numerics=numerics,
            first_step=segment.start,
            stop_step=segment.stop,
            world_ranks=cell.ranks,
            order_seed=segment.scenario.run.seed,
            calls_made=calls_made,
            observed=shown,
        )
        seats.append(Seat(cell=cell, workload=workload, judge=judge))
    Judge.seat_together([seat.judge for seat in seats])
    return seats
