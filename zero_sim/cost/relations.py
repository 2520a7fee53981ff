"""Relations that any system of a stage satisfies, whatever it declares: upper bounds of its calls.

[Note: what is owed]
In a step each element is summed over the ranks once, or once a micro-batch where the rules say so,
and once more over copies of the shards; and it is gathered at most twice a micro-batch, for forward
and for backward, once for a forward under `no_grad`, once after the update; with stage 0 never, but
for a sum that is made of a scatter and a gather. Gathers carry working params, in a dtype no wider
than theirs; but for sums that one rank makes and sends back, which have the dtype of gradients.
What a system adds of its own is padding: each param up to whole rows for every rank, or to
`Costs.align_elems` or what the case asks to align to, and each bucket, of which there are no more
than params, up to that for each rank.
Control messages do not count (`zero_sim.cost.volume`).

Nothing is said of a case in which other numbers travel by the same calls: activations of split
layers, experts, what optimizers of whole matrices exchange, ranks that join without data, fp8.
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
    """Why no relation is owed in a case; empty where they are.

    Args:
        scenario: The case as a dp-cp group sees it.
    """
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
    """Check what any system of a stage satisfies; see [Note: what is owed].

    Args:
        records: All calls of the world.
        windows: Where the steps of one dp-cp group lie among them.
        held: What the module of each of its ranks has, by rank.
        scenario: The case by the target's rules, as that group sees it.
        costs: What the target declares.

    Returns:
        The first finding, if there is any.
    """
    if why_unrelated(scenario):
        return
    sums, gathers = _sums(scenario), costs.gathers
    gathers = _gathers(scenario) if gathers is None else gathers
    # A target declares its training alone.
    gathers += scenario.run.evaluate != "never"
    # An element has a byte at least.
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
        for record in made.gathered:
            if record.elem_bytes > widest and _gathers_params_alone(scenario):
                yield finding_of(
                    window,
                    f"{record.text} gathers {record.elem_bytes} bytes an element of params that "
                    f"have {widest}",
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
                    f"this rank's calls of the step have {done} elements {what}, in a model of "
                    f"{own} that a step has {what} at most {times} times ({most} with all padding "
                    "that is known)",
                )
                return


def _gathers_params_alone(scenario: Scenario) -> bool:
    """Whether no sums of gradients are gathered, as a scatter and a gather or by their owner."""
    return scenario.system.stage > 0 and scenario.system.sum_by != "first-rank"


def _sums(scenario: Scenario) -> int:
    """How often a step sums each element at most."""
    return rounds_of_sums(scenario) * (2 if scenario.system.redundancy > 1 else 1)


def _gathers(scenario: Scenario) -> int:
    """How often a step gathers each element at most."""
    system, rounds = scenario.system, rounds_of_sums(scenario)
    if not system.stage:
        return rounds
    sent_back = rounds if system.sum_by != "reduce-scatter" else 0
    return 2 * scenario.run.micro_batches + 1 + (system.redundancy > 1) + sent_back


def _padded_elems(sizes: Sequence[HeldSize], *, ranks: int, align_elems: int) -> int:
    """Elements of all that is held, with all padding that a system may add."""
    total = 0
    for size in sizes:
        if not size.elems:
            continue
        rows = -(-size.elems // size.row_elems)
        whole_rows = -(-rows // ranks) * ranks * size.row_elems
        aligned = -(-size.elems // align_elems) * align_elems
        total += max(whole_rows, aligned) + align_elems * ranks
    return total
