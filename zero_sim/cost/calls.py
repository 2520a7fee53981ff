"""Closed form of a rank's collectives in a textbook ZeRO step.

It needs only the scenario and param sizes: no tensors, so that it also covers 16,384 ranks, and no
code of the layout under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from zero_sim.cost.forms import BucketForm, Call, ParamSize, by_registration
from zero_sim.cost.grad_forms import GradForm, grad_forms
from zero_sim.scenario.derived import counts_over_ranks
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import activation_elems, is_tp_block, rows_of

WHOLES: Final[Mapping[str, int]] = {"muon": 1, "lamb": 2}
"""fp32 numbers per element that each step gathers, for optimizers that need whole params."""

NORM_ELEMS = 3
"""Elements of the norm's control message: sum of squares, zeros, overflows."""

Among = Literal["group", "block", "across", "parts"]
"""Members of a call:

    group   all ranks that train params of this kind
    block   a shard group
    across  ranks with the same shard in all shard groups
    parts   a model-parallel group: the same group rank in all dp-cp groups
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """A planned collective."""

    kind: str
    among: Among
    ranks: range
    """Members as group ranks in the dp-cp group; for `parts`, indices of dp-cp groups."""
    elems: int
    """Elements that the rank contributes, counted as in the event log."""
    dtype: str
    elem_bytes: int
    is_control: bool = False
    """True for messages with a fixed length, or a length per param: norm, row counts, scales."""

    @property
    def call(self) -> Call:
        """Kind, group size and elements, for comparison with the event log."""
        return (self.kind, len(self.ranks), self.elems)

    @property
    def bytes(self) -> int:
        """Bytes that the rank contributes."""
        return self.elems * self.elem_bytes


def planned_calls(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool = False
) -> Counter[PlannedCall]:
    """Return a rank's calls in a step, in no particular order.

    Args:
        sizes: The rank's trained params, in registration order.
        scenario: The dp-cp group's case.
        rank: Group rank.
        skipped: True if the step was skipped, so no params were gathered.
    """
    return Counter(_planned_calls(tuple(sizes), scenario, rank, skipped))


# Cached, because the checks of calls and bytes both need it for each step.
@lru_cache(maxsize=64)
def _planned_calls(
    sizes: tuple[ParamSize, ...], scenario: Scenario, rank: int, skipped: bool
) -> Counter[PlannedCall]:
    system = scenario.system
    calls = Counter(_of_few_numbers(sizes, scenario=scenario, rank=rank, skipped=skipped))
    # With sync = "every", each micro-batch is reduced; otherwise, only the last.
    sums = scenario.run.micro_batches if system.sync == "every" else 1
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        calls += _calls_of_bucket(form, scenario=scenario, rank=rank, sums=sums, skipped=skipped)
    # With reduce buffers, gradients are reduced by grad unit, not by bucket.
    for unit in grad_forms(sizes, scenario=scenario, rank=rank):
        calls += _calls_of_grads(unit, scenario=scenario, rank=rank, sums=sums)
    calls += calls_of_layers(scenario, rank=rank)
    return calls


def calls_of_layers(scenario: Scenario, *, rank: int) -> Counter[PlannedCall]:
    """Return a group rank's calls in split layers over tensor-parallel ranks, in a step."""
    calls: Counter[PlannedCall] = Counter()
    tp, system = scenario.topology.tp, scenario.system
    if not is_tp_block(scenario) or tp == 1:
        return calls
    elems = activation_elems(scenario, rows=rows_of(scenario, rank=rank))
    times = scenario.model.blocks * scenario.run.micro_batches
    dtype, each = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2), "fp16": ("float16", 2)}[
        scenario.model.dtype
    ]

    def among_parts(kind: str, elems: int) -> PlannedCall:
        return PlannedCall(
            kind=kind,
            among="parts",
            ranks=range(tp),
            elems=elems,
            dtype=dtype,
            elem_bytes=each,
        )

    # Forward and backward; with activation checkpoints, backward runs the forward again.
    runs = 2 if system.checkpoints == "none" else 3
    # Each pass through a block has two sums: after attention and after the MLP.
    calls[among_parts("all_reduce", elems)] = 2 * runs * times
    if system.checkpoints == "split":
        # Each rank contributes its part of the checkpoint, rounded up (ZeRO, section 6.1).
        calls[among_parts("all_gather", -(-elems // tp))] = times
    return calls


def _calls_of_grads(
    form: GradForm, *, scenario: Scenario, rank: int, sums: int
) -> Counter[PlannedCall]:
    """Return the calls that reduce a grad unit `sums` times in a step."""
    among = ranks_among(form.kind, scenario=scenario, rank=rank, group_size=form.group_size)
    calls: Counter[PlannedCall] = Counter()
    for kind, _, elems in form.sum_calls:
        planned = PlannedCall(
            kind=kind,
            among="block",
            ranks=among["block"],
            elems=elems,
            dtype=form.grad_dtype,
            elem_bytes=form.grad_bytes,
        )
        calls[planned] += sums
    return calls


def _calls_of_bucket(
    form: BucketForm, *, scenario: Scenario, rank: int, sums: int, skipped: bool = False
) -> Counter[PlannedCall]:
    """Return the calls that move a bucket in a step, if it is reduced `sums` times."""
    ranks = ranks_among(form.kind, scenario=scenario, rank=rank, group_size=form.group_size)
    # fp8 values are sent as bytes, because backends have no fp8 collectives.
    moved = "uint8" if form.param_dtype.startswith("float8") else form.param_dtype
    grads, params = (form.grad_dtype, form.grad_bytes), (moved, form.param_bytes)
    calls: Counter[PlannedCall] = Counter()

    def add(call: Call | None, among: Among, of: tuple[str, int], count: int) -> None:
        if call is not None and count:
            kind, _, elems = call
            planned = PlannedCall(
                kind=kind,
                among=among,
                ranks=ranks[among],
                elems=elems,
                dtype=of[0],
                elem_bytes=of[1],
            )
            calls[planned] += count

    if not form.is_sharded:
        # Stage 0: a plain all-reduce over all ranks with a copy, and no gather.
        add(form.sum_call, "group", grads, sums)
        add(form.sent_back_call, "group", grads, sums)
        return calls
    if scenario.system.reduce_buffer_elems is None:
        # With reduce buffers, `_calls_of_grads` counts the reductions.
        add(form.sum_call, "block", grads, sums)
        add(form.sent_back_call, "block", grads, sums)
    # With replicas, a second sum joins the ranks with the same shard.
    add(form.replica_call, "across", grads, sums)
    gathers = gathers_of_step(scenario, is_last=form.is_last, skipped=skipped)
    for call in form.gather_calls:
        add(call, "block", params, gathers)
    # Muon and LAMB need whole tensors in fp32. Skipped steps and uncut buckets need no gather.
    wholes = 0 if skipped or not form.is_cut else WHOLES.get(scenario.optimizer.name, 0)
    add(form.whole_call, "block", ("float32", 4), wholes)
    return calls


def calls_of_step(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool
) -> Counter[Call]:
    """Count a step's calls by kind, group size and elements; arguments as for `planned_calls`."""
    calls: Counter[Call] = Counter()
    planned = planned_calls(sizes, scenario=scenario, rank=rank, skipped=skipped)
    for call, count in planned.items():
        # Add, because calls that only differ in dtype or members have the same key.
        calls[call.call] += count
    return calls


def ranks_among(kind: str, *, scenario: Scenario, rank: int, group_size: int) -> dict[Among, range]:
    """Return the members of a group rank's calls, as group ranks."""
    # Experts are assigned round-robin, so ranks `ep` apart hold the same experts.
    ways = scenario.topology.ep if kind == "expert" else 1
    holders = range(rank % ways, scenario.world.size, ways)
    # A shard group has consecutive holders.
    place = rank // ways
    first = place - place % group_size
    return {
        "group": holders,
        "block": holders[first : first + group_size],
        "across": holders[place % group_size :: group_size],
        "parts": range(scenario.topology.tp * scenario.topology.pp),
    }


def gathers_of_step(scenario: Scenario, *, is_last: bool, skipped: bool) -> int:
    """Return how often a step gathers a bucket's params."""
    system = scenario.system
    if system.stage < 3:
        # Stages 1 and 2 gather after the update, and a skipped step has no update.
        return 0 if skipped else 1
    # Stage 3 gathers before each forward, and again before backward unless params were kept. The
    # last bucket of a forward is always kept, because backward needs it first.
    kept = is_last or not system.reshard_after_forward
    after_step = system.gather_after_step and not skipped
    # A forward under `no_grad` keeps nothing, so it adds a gather.
    evaluations = scenario.run.evaluate != "never"
    return scenario.run.micro_batches * (1 if kept else 2) + evaluations + after_step


def _of_few_numbers(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool
) -> Iterator[PlannedCall]:
    def few(ranks: range, elems: int, dtype: str, elem_bytes: int, among: Among) -> PlannedCall:
        return PlannedCall(
            kind="all_reduce",
            among=among,
            ranks=ranks,
            elems=elems,
            dtype=dtype,
            elem_bytes=elem_bytes,
            is_control=True,
        )

    system, everybody = scenario.system, range(scenario.world.size)
    # A single fp64 message for the norm; see `NORM_ELEMS`.
    yield few(everybody, NORM_ELEMS, "float64", 8, "group")
    parts = scenario.topology.tp * scenario.topology.pp
    if parts > 1:
        # The norm covers the whole model, so a second message sums over its parts.
        yield few(range(parts), NORM_ELEMS, "float64", 8, "parts")
    if counts_over_ranks(scenario):
        # The gradients' divisor: tokens or micro-batches, counted over all ranks.
        yield few(everybody, 1, "int64", 8, "group")
    if not system.stage or skipped:
        # Without shards, each rank computes all scales. A skipped step writes no params.
        return
    # fp8 scales: a maximum over shards, with one element per fp8 param.
    for kind, ways in (("dense", 1), ("expert", scenario.topology.ep)):
        count = sum(size.kind == kind and size.dtype.startswith("torch.float8") for size in sizes)
        if count:
            holders = scenario.world.size // ways
            group_size = holders // system.redundancy
            ranks = ranks_among(kind, scenario=scenario, rank=rank, group_size=group_size)
            yield few(ranks["block"], count, "float32", 4, "block")
