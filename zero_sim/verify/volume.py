"""What a step of the textbook's ZeRO communicates, in closed form, against what it did.

A stage that reduces more than it has to, gathers twice or sends elements that belong to nobody has
the right numbers and the wrong cost. The closed forms follow from the scenario and the sizes of the
params alone; they share no code with the layout that they judge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zero_sim.scenario.spec import Scenario
from zero_sim.sim import CollectiveRecord
from zero_sim.verify.records import Finding

NORM_ELEMS = 3
"""What ranks tell each other for the norm: sum of squares, zeros, overflows."""

Call = tuple[str, int, int]
"""Kind of a collective, size of its group, and the elements that a rank contributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSize:
    """One param as far as costs depend on it."""

    kind: str
    """`dense`, or `expert`: what lies below a module named `experts`."""
    dtype: str
    elems: int
    param_bytes: int
    """Size of an element."""
    grad_bytes: int
    """Size of an element of its gradient, as autograd gives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketForm:
    """One bucket with elements, as one rank sees it."""

    elems: int
    """With its padding."""
    payload_elems: int
    shard_elems: int
    """Of this rank's shard, padding included."""
    shard_start: int
    group_size: int
    """Ranks that shard it; those that sum it with stage 0."""
    replica_count: int
    is_even: bool
    param_bytes: int
    grad_bytes: int

    @property
    def owns_elems(self) -> bool:
        """Whether a param reaches into this rank's shard."""
        return self.shard_elems > 0 and self.shard_start < self.payload_elems


def sizes_of(module: nn.Module) -> tuple[ParamSize, ...]:
    """The trained params of a module, in registration order; before anybody wrapped it."""
    return tuple(
        ParamSize(
            kind="expert" if "experts" in name.split(".") else "dense",
            dtype=str(param.dtype),
            elems=param.numel(),
            param_bytes=param.element_size(),
            grad_bytes=(getattr(param, "grad_dtype", None) or param.dtype).itemsize,
        )
        for name, param in module.named_parameters()
        if param.requires_grad
    )


def bucket_forms(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int
) -> tuple[BucketForm, ...]:
    """The buckets with elements that a layout has to have, in no order that matters.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    buffers: dict[tuple[str, str], list[ParamSize]] = {}
    for size in sizes:
        buffers.setdefault((size.kind, size.dtype), []).append(size)
    return tuple(
        form
        for members in buffers.values()
        for bucket in _cut(members, scenario=scenario)
        if (form := _form(bucket, scenario=scenario, rank=rank)).elems
    )


def _cut(members: Sequence[ParamSize], *, scenario: Scenario) -> Iterator[list[ParamSize]]:
    """A bucket closes as soon as it holds enough; a param without elements opens none."""
    system = scenario.system
    bucket: list[ParamSize] = []
    for size in members if system.param_order == "registration" else members[::-1]:
        held = sum(member.elems for member in bucket)
        if system.bucket_elems is not None and held >= system.bucket_elems and size.elems:
            yield bucket
            bucket = []
        bucket.append(size)
    yield bucket


def _form(bucket: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> BucketForm:
    system, ways = scenario.system, scenario.topology.ep
    holders, place = scenario.world.size, rank
    if bucket[0].kind == "expert":
        holders, place = holders // ways, rank // ways
    group_size = holders // system.redundancy
    shards = group_size if system.stage else 1
    payload = sum(size.elems for size in bucket)
    param_bytes = bucket[0].param_bytes
    elems = payload
    if system.partition == "padded":
        aligned = system.align_bytes // math.gcd(system.align_bytes, param_bytes)
        unit = shards * math.lcm(system.align_elems, aligned)
        elems = -(-payload // unit) * unit
    shortest, longer_count = divmod(elems, shards)
    shard = place % shards
    return BucketForm(
        elems=elems,
        payload_elems=payload,
        shard_elems=shortest + (shard < longer_count),
        shard_start=shard * shortest + min(shard, longer_count),
        group_size=group_size,
        replica_count=system.redundancy,
        is_even=longer_count == 0,
        param_bytes=param_bytes,
        grad_bytes=4 if system.grad_dtype == "fp32" else bucket[0].grad_bytes,
    )


def calls_of_step(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int, skipped: bool
) -> Counter[Call]:
    """What one rank has to call in one step, in whatever order.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        skipped: Whether the step was, so that nothing was gathered.
    """
    system, world_size = scenario.system, scenario.world.size
    calls: Counter[Call] = Counter({("all_reduce", world_size, NORM_ELEMS): 1})
    parts = scenario.topology.tp * scenario.topology.pp
    if parts > 1:
        calls["all_reduce", parts, NORM_ELEMS] += 1
    if system.divide_by == "tokens":
        calls["all_reduce", world_size, 1] += 1
    sums = scenario.run.micro_batches if system.sync == "every" else 1
    for form in bucket_forms(sizes, scenario=scenario, rank=rank):
        if not system.stage:
            calls["all_reduce", form.group_size, form.elems] += sums
            continue
        reduced_by = "reduce_scatter" if form.is_even else "reduce_scatter_list"
        calls[reduced_by, form.group_size, form.elems] += sums
        if form.replica_count > 1 and form.shard_elems:
            calls["all_reduce", form.replica_count, form.shard_elems] += sums
        if not skipped:
            gathered = ("all_gather", form.group_size, form.shard_elems)
            sent_to_all = ("all_to_all", form.group_size, form.shard_elems * form.group_size)
            calls[gathered if form.is_even else sent_to_all] += 1
    if system.stage and not skipped:
        calls += _scale_calls(sizes, scenario=scenario)
    return +calls


def _scale_calls(sizes: Sequence[ParamSize], *, scenario: Scenario) -> Counter[Call]:
    """One maximum over the shards of each kind that has params in fp8, an element a param."""
    calls: Counter[Call] = Counter()
    for kind, ways in (("dense", 1), ("expert", scenario.topology.ep)):
        count = sum(size.kind == kind and size.dtype.startswith("torch.float8") for size in sizes)
        if count:
            group_size = scenario.world.size // ways // scenario.system.redundancy
            calls["all_reduce", group_size, count] += 1
    return calls


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The stretch of the event log in which one rank took one step."""

    rank: int
    """Rank in its dp-cp group."""
    world_rank: int
    step: int
    start: int
    stop: int
    """Half-open range of `EventLog.collectives`."""
    skipped: bool


def check_volume(
    records: Sequence[CollectiveRecord],
    windows: Sequence[StepWindow],
    *,
    sizes: Mapping[int, Sequence[ParamSize]],
    scenario: Scenario,
) -> Iterator[Finding]:
    """Check kind, group size and elements of every call of every step.

    Args:
        records: All calls of the world.
        windows: Where the steps of one dp-cp group lie among them.
        sizes: What each of its ranks trains, by rank.
        scenario: The case as that group sees it.
    """
    forms: dict[tuple[int, bool], Counter[Call]] = {}
    for window in windows:
        key = (window.rank, window.skipped)
        if key not in forms:
            forms[key] = calls_of_step(
                sizes[window.rank], scenario=scenario, rank=window.rank, skipped=window.skipped
            )
        made: Counter[Call] = Counter(
            (record.kind, len(record.group_ranks), record.elems)
            for record in records[window.start : window.stop]
            if record.rank == window.world_rank and record.kind != "barrier"
        )
        if made != forms[key]:
            yield Finding(
                check="invariant.volume",
                step=window.step,
                rank=window.world_rank,
                message="this rank's collectives of the step are not those of the closed form: "
                f"{_difference(made, forms[key])}",
            )
            return


def _difference(made: Counter[Call], owed: Counter[Call]) -> str:
    parts = [f"{_in_words(made - owed)} too many" if made - owed else ""]
    parts.append(f"{_in_words(owed - made)} missing" if owed - made else "")
    return "; ".join(part for part in parts if part)


def _in_words(calls: Counter[Call]) -> str:
    return ", ".join(
        f"{count} x {kind} of {elems} elements on {ranks} ranks"
        for (kind, ranks, elems), count in sorted(calls.items())
    )
