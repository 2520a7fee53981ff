"""Upper bounds of calls that hold for any system at a stage, without a declared closed form.

[Note: upper bounds]
Per step and element:

    sums       one over the ranks, or one per micro-batch with sync = "every"; with replicas of the
               shards, as many again.
    gathers    at most two per micro-batch (forward, backward), one for a forward under `no_grad`,
               one after the update; with replicas, one more. At stage 0 none, except for sums by
               scatter and gather.

Gathers carry working params, so they are not wider than these. Gradient sums that a rank makes
and broadcasts are an exception. Control messages do not count (`zero_sim.cost.volume`).

A system may pad each param to whole rows on every rank or to the alignment (`Costs.align_elems`, or
the case's), and each bucket to the alignment on every rank. There are at most as many buckets as
params.

No bound applies if the same calls carry other numbers: activations of split layers, experts,
exchanges of whole-matrix optimizers, ranks that join without data, fp8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zero_sim.cost.calls import WHOLES
from zero_sim.cost.volume import (
    HeldSize,
    StepWindow,
    control_elems,
    finding_of,
    messages_of,
    rounds_of_sums,
)
from zero_sim.findings.records import Finding
from zero_sim.scenario.kinds import may_gather_again
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import is_tp_block
from zero_sim.targets.costs import Costs

if TYPE_CHECKING:
    from zero_sim.sim import CollectiveRecord


def why_unrelated(scenario: Scenario) -> str:
    """Return the reason why no bound applies to a dp-cp group's case; empty if bounds apply."""
    # See [Note: upper bounds]: here, the same calls carry other numbers.
    for reason, holds in (
        ("split layers", is_tp_block(scenario)),
        ("experts", scenario.topology.ep > 1),
        ("an optimizer of whole matrices", scenario.optimizer.name in WHOLES),
        ("ranks that join", bool(scenario.run.own_micro_batches)),
        ("modules that are used twice", may_gather_again(scenario)),
        ("fp8", scenario.model.name == "fp8"),
    ):
        if holds:
            return reason
    return ""


def check_relations(
    records: Sequence[CollectiveRecord],
    windows: Sequence[StepWindow],
    *,
    held: Mapping[int, Sequence[HeldSize]],
    scenario: Scenario,
    costs: Costs,
) -> Iterator[Finding]:
    """Check the bounds that hold for any system at a stage; see [Note: upper bounds].

    Args:
        records: All calls in the world.
        windows: A dp-cp group's steps, as intervals of `records`.
        held: Params and buffers in each rank's module.
        scenario: The dp-cp group's case, with the target's rules.
        costs: Costs that the target declares.

    Returns:
        At most one finding.
    """
    if why_unrelated(scenario):
        return
    sums, gathers = _sums(scenario), costs.gathers
    gathers = _gathers(scenario) if gathers is None else gathers
    # `costs.gathers` covers training only; a forward under `no_grad` gathers once more.
    gathers += scenario.run.evaluate != "never"
    # An element has at least one byte, so an alignment in bytes is at most as many elements.
    asked = math.lcm(scenario.system.align_elems, scenario.system.align_bytes)
    align_elems = max(costs.align_elems, asked)
    padded = {
        rank: _padded_elems(sizes, ranks=scenario.world.size, align_elems=align_elems)
        for rank, sizes in held.items()
    }
    for window in windows:
        sizes, most = held[window.rank], padded[window.rank]
        made = messages_of(window, records, control=control_elems(sizes))
        widest = max((size.elem_bytes for size in sizes), default=0)
        # Wider numbers waste bandwidth: gathers should carry working params, not masters.
        for record in made.gathered:
            if record.elem_bytes > widest and _gathers_params_alone(scenario):
                yield finding_of(
                    window,
                    f"{record.text} gathers {record.elem_bytes} bytes per element, expected at "
                    f"most {widest}, the width of the params",
                )
                return
        for what, done, times in (
            ("summed over ranks", sum(each.elems for each in made.reduced), sums),
            ("gathered", sum(each.output_elems for each in made.gathered), gathers),
        ):
            if done > most * times:
                own = sum(size.elems for size in sizes)
                yield finding_of(
                    window,
                    f"this rank's calls of the step have {done} elements {what}, expected at most "
                    f"{most}: a step has each of the model's {own} {what} at most {times} times, "
                    "and all padding that is known",
                )
                return


def _gathers_params_alone(scenario: Scenario) -> bool:
    """Return True if gathers never carry gradient sums."""
    # Stage 0 may sum by scatter and gather, and the first rank broadcasts its sum.
    return scenario.system.stage > 0 and scenario.system.sum_by != "first-rank"


def _sums(scenario: Scenario) -> int:
    # With replicas, ranks sum within the shard group, then over replicas.
    return rounds_of_sums(scenario) * (2 if scenario.system.redundancy > 1 else 1)


def _gathers(scenario: Scenario) -> int:
    """Return how often a step may gather an element, at most."""
    system, rounds = scenario.system, rounds_of_sums(scenario)
    if not system.stage:
        # A sum at stage 0 may be a scatter and a gather.
        return rounds
    sent_back = rounds if system.sum_by != "reduce-scatter" else 0
    # One before each forward and backward, and one after the update.
    return 2 * scenario.run.micro_batches + 1 + (system.redundancy > 1) + sent_back


def _padded_elems(sizes: Sequence[HeldSize], *, ranks: int, align_elems: int) -> int:
    """Return the elements of all tensors, with the most padding that a system may add."""
    total = 0
    for size in sizes:
        if not size.elems:
            continue
        rows = -(-size.elems // size.row_elems)
        # FSDP2 pads to whole rows, flat buffers to aligned elements: take the larger.
        whole_rows = -(-rows // ranks) * ranks * size.row_elems
        aligned = -(-size.elems // align_elems) * align_elems
        # The last term is bucket padding, because each param may have its own bucket.
        total += max(whole_rows, aligned) + align_elems * ranks
    return total
