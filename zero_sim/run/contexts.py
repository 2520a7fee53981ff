"""Judges and references for a world's dp-cp groups, built before ranks start."""

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
    """World rank that this process observes; None for all ranks."""
    calls_made: Callable[[], int] | None = None
    """Counter of calls, as for `Judge`."""
    wired: SharedSteps | None = None
    """Steps that one process computes for all; None if this process has all ranks."""
    trajectories: Trajectories | None = None
    """Steps computed by references in earlier cases; None to keep none."""
    explainer: str = ""
    """Class that explains differences; see `JudgedGroup`."""


def build_contexts(
    segment: Segment,
    *,
    references: MutableMapping[int, AnyReference],
    target: Target,
    device: str,
    added_in: str | None,
    view: View,
) -> Sequence[GroupContext]:
    """Build the contexts of all dp-cp groups in a segment's world. Their judges share a norm.

    Args:
        segment: The steps to judge, and their world.
        references: References by group index. Contains those of the previous world; receives those
            that the next world continues.
        target: The system under test.
        device: Device of the references.
        added_in: Order in which the backend adds; None for the case's order.
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
        observed_ranks = _places_of(rank, dp_cp_group.ranks)
        group = JudgedGroup(
            scenario=replayed,
            numerics=numerics,
            ownership=Ownership(replayed, held=reference.held),
            world_ranks=dp_cp_group.ranks,
            first_step=segment.start,
            sees_all=len(observed_ranks) == replayed.world.size,
            explainer=view.explainer,
            recorder=getattr(target, "layout_recorder", None),
        )
        judge = Judge(
            group,
            reference=reference,
            order_seed=segment.scenario.run.seed,
            observed_ranks=observed_ranks,
            # The second step, because a leak per step shows only then.
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
    """Build a group's reference, or a late reference if a trajectory has its steps."""
    if trajectory is None:
        # Continue the previous world's reference, if any.
        reference = references[index] = build(before=references.get(index))
        return reference

    def build_exact() -> Reference:
        reference = build(before=None)
        assert isinstance(reference, Reference)
        return reference

    # An earlier case of the family has built a reference, so build this only if a value differs.
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
    """Return the trajectory for all inputs of the steps; None if bits depend on the layout."""
    keys = []
    for group in dp_cp_groups_of(segment.scenario):
        numerics = numerics_of(target, group.scenario)
        # In another layout, a norm over shards or an order by positions gives other bits.
        by_layout = numerics.norm != "of-elements"
        if by_layout or group.scenario.world.order not in POSITION_FREE:
            return None
        computed = computed_from(numerics.replayed(group.scenario))
        rules = rules_of(target, group.scenario)
        keys.append((computed, rules, tuple(group.uncounted), tuple(group.elsewhere)))
    return trajectories.of(tuple(keys))


def _can_share(segment: Segment, *, target: Target) -> bool:
    """Return True if digests of the reference's steps suffice as long as they match."""
    scenario = segment.scenario
    # A reference that continues in another world must itself have taken the steps before.
    is_all = segment.load is None and segment.save is None
    # Bounds, `one_device` and drawn weights need the reference's tensors, not only digests.
    is_plain = scenario.world.order_known and not scenario.expect.one_device
    is_plain &= not draws_weights(target)
    return (
        is_all
        and is_plain
        and all(
            # A reported norm is an input of the step, so each reference must compute its own step.
            numerics_of(target, each.scenario).norm != "reported"
            for each in dp_cp_groups_of(scenario)
        )
    )


def _keep_for_reload(
    segment: Segment, references: MutableMapping[int, AnyReference], index: int, step: int
) -> None:
    """Keep a copy of the reference for the next world if an asynchronous save begins now.

    Only the values of the copy are used, because `continue_as` rebuilds its modules.
    """
    # This reference trains on during the save, but the next world starts from the checkpoint.
    if step + 1 == segment.save_step:
        references[index] = deepcopy(references[index])
