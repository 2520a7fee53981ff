"""Judges and references for the dp-cp groups of a world, built before its ranks start."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from zero_sim.judge.comparison import AnyReference, take_reference
from zero_sim.judge.judge import Judge
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.ownership import Ownership
from zero_sim.judge.step_source import SharedSteps
from zero_sim.judge.trajectory import LateReference, Trajectories, Trajectory
from zero_sim.reference import POSITION_FREE, Reference, computed_from
from zero_sim.run.dp_cp_groups import dp_cp_groups_of
from zero_sim.run.program import GroupContext, Segment
from zero_sim.targets import Target, numerics_of, rules_of
from zero_sim.targets.drawn_weights import draws_weights
from zero_sim.workloads import build_workload, on_device


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """View of a world from one process."""

    rank: int | None = None
    """World rank that this process observes. None if it observes all."""
    calls_made: Callable[[], int] | None = None
    """Counter of calls, as for `Judge`."""
    wired: SharedSteps | None = None
    """Steps that one process computes for all. None if this process has all ranks."""
    trajectories: Trajectories | None = None
    """Steps that references of earlier cases computed. None if none are kept."""
    explainer: str = ""
    """As for `JudgedGroup`."""


def build_contexts(
    segment: Segment,
    *,
    references: MutableMapping[int, AnyReference],
    target: Target,
    device: str,
    added_in: str | None,
    view: View,
) -> Sequence[GroupContext]:
    """Build the context of every dp-cp group of a segment's world. Their judges share a norm.

    Args:
        segment: The steps to judge, and their world.
        references: References by group index, from the world before. Left for the next world as
            they are when its save begins.
        target: The system under test.
        device: Device of the references.
        added_in: Order in which the backend adds; None for the order that the case names.
        view: View of the world from this process.

    Raises:
        ModelError: The model has nothing to train.
        UsageError: A reference cannot continue in this world.
    """
    contexts: list[GroupContext] = []
    trajectory, shared, rank = None, None, view.rank
    shares = view.wired is not None or view.trajectories is not None
    if shares and _can_share(segment, target=target):
        shared = view.wired
        if view.trajectories is not None:
            shared = trajectory = _trajectory_of(segment, view.trajectories, target=target)
    for index, dp_cp_group in enumerate(dp_cp_groups_of(segment.scenario)):
        numerics = numerics_of(target, dp_cp_group.scenario)
        replayed = numerics.replayed(dp_cp_group.scenario, added_in=added_in)
        workload = on_device(build_workload(dp_cp_group.scenario), device)
        build = partial(
            take_reference,
            replayed,
            workload=workload,
            uncounted=dp_cp_group.uncounted,
            elsewhere=dp_cp_group.elsewhere,
            weights_only=segment.weights_only,
            rules=rules_of(target, dp_cp_group.scenario, added_in=added_in),
        )
        reference = _built(build, references, index, trajectory=trajectory)
        observed = _places_of(rank, dp_cp_group.ranks)
        group = JudgedGroup(
            scenario=replayed,
            numerics=numerics,
            ownership=Ownership(replayed, held=reference.held),
            world_ranks=dp_cp_group.ranks,
            first_step=segment.start,
            sees_all=len(observed) == replayed.world.size,
            explainer=view.explainer,
            recorder=getattr(target, "layout_recorder", None),
        )
        judge = Judge(
            group,
            reference=reference,
            order_seed=segment.scenario.run.seed,
            observed=observed,
            # Memory that leaks per step shows after the second step.
            weighed_step=min(segment.start + 1, segment.stop - 1),
            calls_made=view.calls_made,
            after_step=partial(_keep_for_reload, segment, references, index),
            shared=shared,
        )
        contexts.append(GroupContext(dp_cp_group=dp_cp_group, workload=workload, judge=judge))
    Judge.join_peers([context.judge for context in contexts])
    return contexts


def _built(
    build: Callable[..., AnyReference],
    references: MutableMapping[int, AnyReference],
    index: int,
    *,
    trajectory: Trajectory | None,
) -> AnyReference | LateReference:
    """Build the reference of a group, or one that is late because a trajectory has its steps.

    Args:
        build: Builds a reference, or continues an earlier one.
        references: References by group index. A case with a trajectory has one world only.
        index: Index of the group.
        trajectory: Steps of earlier cases of a family.
    """
    if trajectory is None:
        # The reference of the world before, if any, continues.
        reference = references[index] = build(before=references.get(index))
        return reference

    def build_exact() -> Reference:
        reference = build(before=None)
        assert isinstance(reference, Reference)
        return reference

    # An earlier case has built a reference: this one is only built if something differs.
    if index in trajectory.held:
        return LateReference(build=build_exact, held=trajectory.held[index])
    reference = build_exact()
    trajectory.held[index] = reference.held
    return reference


def _places_of(rank: int | None, ranks: Sequence[int]) -> list[int]:
    return [place for place, each in enumerate(ranks) if rank in (None, each)]


def _trajectory_of(
    segment: Segment, trajectories: Trajectories, *, target: Target
) -> Trajectory | None:
    """Return the trajectory for all inputs of these groups' steps; None if layouts change steps."""
    keys = []
    for group in dp_cp_groups_of(segment.scenario):
        numerics = numerics_of(target, group.scenario)
        # A norm of shards, or an order that depends on positions, gives other bits in another
        # layout.
        by_layout = numerics.norm != "of-elements"
        if by_layout or group.scenario.world.order not in POSITION_FREE:
            return None
        computed = computed_from(numerics.replayed(group.scenario))
        rules = rules_of(target, group.scenario)
        keys.append((computed, rules, tuple(group.uncounted), tuple(group.elsewhere)))
    return trajectories.of(tuple(keys))


def _can_share(segment: Segment, *, target: Target) -> bool:
    """Return True if digests of the reference's steps suffice while they match."""
    scenario = segment.scenario
    # A reference that continues in another world must have taken the steps before.
    is_all = segment.load is None and segment.save is None
    # Bounds, one device and drawn weights need the reference's tensors, not only digests.
    is_plain = scenario.world.order_known and not scenario.expect.one_device
    is_plain &= not draws_weights(target)
    return (
        is_all
        and is_plain
        and all(
            # A reported norm is an input of the step, so each reference must take it.
            numerics_of(target, each.scenario).norm != "told"
            for each in dp_cp_groups_of(scenario)
        )
    )


def _keep_for_reload(
    segment: Segment, references: MutableMapping[int, AnyReference], index: int, step: int
) -> None:
    """Leave a copy for the next world if an asynchronous save begins after a step.

    The copy does not use modules, because `continue_as` rebuilds them.
    """
    # This reference trains on, but the next world starts from the save.
    if step + 1 == segment.save_step:
        references[index] = deepcopy(references[index])
