"""The calls that a step of the textbook's ZeRO makes on one rank, in closed form.

They follow from the scenario and the sizes of the params alone, and share no code with the layout
that is judged by them; no tensors, so that they are known for 16,384 ranks as well.
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
"""Of optimizers that look at whole params: fp32 numbers an element of which they need all."""

NORM_ELEMS = 3
"""What ranks tell each other for the norm: sum of squares, zeros, overflows."""

Among = Literal["group", "block", "across", "parts"]
"""Who meets: all ranks that train a kind of params; those that shard it; of these the few that keep
params between a forward and its backward; those at one place of all blocks; those at one place of
all parts of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """One call of one rank."""

    kind: str
    among: Among
    ranks: range
    """Members in the dp-cp group; of `parts`, as many as there are, by number."""
    elems: int
    """What the rank contributes, counted as the event log does."""
    dtype: str
    elem_bytes: int
    is_control: bool = False
    """True for the norm, the rows, the scales: a few numbers, whatever the model's size."""

    @property
    def call(self) -> Call:
        """Kind, size of the group and elements: what is compared with the event log."""
        return (self.kind, len(self.ranks), self.elems)

    @property
    def bytes(self) -> int:
        """Size of the contribution."""
        return self.elems * self.elem_bytes


def planned_calls(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool = False
) -> Counter[PlannedCall]:
    """What one rank has to call in one step, in whatever order.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        skipped: Whether the step was, so that nothing was gathered.
    """
    return Counter(_planned_calls(tuple(sizes), scenario, rank, skipped))


# Bytes are held to them as well as the calls themselves.
@lru_cache(maxsize=64)
def _planned_calls(
    sizes: tuple[ParamSize, ...], scenario: Scenario, rank: int, skipped: bool
) -> Counter[PlannedCall]:
    system = scenario.system
    calls = Counter(_of_few_numbers(sizes, scenario=scenario, rank=rank, skipped=skipped))
    sums = scenario.run.micro_batches if system.sync == "every" else 1
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        calls += _calls_of_bucket(form, scenario=scenario, rank=rank, sums=sums, skipped=skipped)
    for unit in grad_forms(sizes, scenario=scenario, rank=rank):
        calls += _calls_of_grads(unit, scenario=scenario, rank=rank, sums=sums)
    calls += calls_of_layers(scenario, rank=rank)
    return calls


def calls_of_layers(scenario: Scenario, *, rank: int) -> Counter[PlannedCall]:
    """What tensor-parallel ranks call in one step to run layers that they split.

    Two sums a block forward, two more where it is run again, and two backward; and a gather of its
    checkpoint where each rank keeps a part of that.

    Args:
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
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

    runs = 2 if system.checkpoints == "none" else 3
    calls[among_parts("all_reduce", elems)] = 2 * runs * times
    if system.checkpoints == "split":
        calls[among_parts("all_gather", -(-elems // tp))] = times
    return calls


def _calls_of_grads(
    form: GradForm, *, scenario: Scenario, rank: int, sums: int
) -> Counter[PlannedCall]:
    """What reduces one reduce buffer's gradients in one step; arguments as `_calls_of_bucket`."""
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
    """What moves one bucket in one step.

    Args:
        form: The bucket.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        sums: How often its gradients are reduced.
        skipped: Whether the step was skipped.
    """
    ranks = ranks_among(form.kind, scenario=scenario, rank=rank, group_size=form.group_size)
    # What moves fp8 moves bytes: collectives know no such numbers.
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
        add(form.sum_call, "group", grads, sums)
        add(form.sent_back_call, "group", grads, sums)
        return calls
    if scenario.system.reduce_buffer_elems is None:
        add(form.sum_call, "block", grads, sums)
        add(form.sent_back_call, "block", grads, sums)
    add(form.copies_call, "across", grads, sums)
    gathers = gathers_of_step(scenario, is_last=form.is_last, skipped=skipped)
    for call in form.gather_calls:
        add(call, "block", params, gathers)
    wholes = 0 if skipped or not form.is_cut else WHOLES.get(scenario.optimizer.name, 0)
    add(form.whole_call, "block", ("float32", 4), wholes)
    return calls


def calls_of_step(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool
) -> Counter[Call]:
    """The same by kind, size of the group and elements alone; arguments as `planned_calls`."""
    calls: Counter[Call] = Counter()
    planned = planned_calls(sizes, scenario=scenario, rank=rank, skipped=skipped)
    for call, count in planned.items():
        calls[call.call] += count
    return calls


def ranks_among(kind: str, *, scenario: Scenario, rank: int, group_size: int) -> dict[Among, range]:
    """Who meets to move the params of a kind, as ranks of the dp-cp group.

    Args:
        kind: `dense` or `expert`.
        scenario: The case as its dp-cp group sees it.
        rank: A rank in that group.
        group_size: Ranks that shard what is moved.
    """
    ways = scenario.topology.ep if kind == "expert" else 1
    holders = range(rank % ways, scenario.world.size, ways)
    place = rank // ways
    first = place - place % group_size
    return {
        "group": holders,
        "block": holders[first : first + group_size],
        "across": holders[place % group_size :: group_size],
        "parts": range(scenario.topology.tp * scenario.topology.pp),
    }


def gathers_of_step(scenario: Scenario, *, is_last: bool, skipped: bool) -> int:
    """How often a bucket's params are gathered in a step.

    Stages 1 and 2: once, after the update. Stage 3: in every micro-batch before forward, and again
    before backward, unless each rank kept all; the bucket that a forward needs last always is.
    Nothing is kept of a forward under `no_grad`.
    """
    system = scenario.system
    if system.stage < 3:
        return 0 if skipped else 1
    kept = is_last or not system.reshard_after_forward
    after_step = system.gather_after_step and not skipped
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
    yield few(everybody, NORM_ELEMS, "float64", 8, "group")
    parts = scenario.topology.tp * scenario.topology.pp
    if parts > 1:
        yield few(range(parts), NORM_ELEMS, "float64", 8, "parts")
    if counts_over_ranks(scenario):
        yield few(everybody, 1, "int64", 8, "group")
    if not system.stage or skipped:
        return
    # One maximum over the shards of each kind that has params in fp8, an element a param.
    for kind, ways in (("dense", 1), ("expert", scenario.topology.ep)):
        count = sum(size.kind == kind and size.dtype.startswith("torch.float8") for size in sizes)
        if count:
            holders = scenario.world.size // ways
            group_size = holders // system.redundancy
            ranks = ranks_among(kind, scenario=scenario, rank=rank, group_size=group_size)
            yield few(ranks["block"], count, "float32", 4, "block")
