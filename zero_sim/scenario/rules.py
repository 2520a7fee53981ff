"""Rules for a scenario whose fields have the right types.

Rules are pure functions. `BOUNDS` has ranges of single numbers, which the JSON Schema also
contains. `RULES` has conditions over several fields. A rule lists the fields that it reads, and is
skipped if any is known to be invalid. All other rules are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from zero_sim.errors import Problem
from zero_sim.scenario.applies import APPLIES, Applies
from zero_sim.scenario.bare_params import check_one_rank, check_readers
from zero_sim.scenario.checks import Check
from zero_sim.scenario.conditions import CONDITIONS, check_order_known
from zero_sim.scenario.costs import check_costs
from zero_sim.scenario.derived import world_size_at
from zero_sim.scenario.fields import check_index, describe_value, values_at
from zero_sim.scenario.fitting import has_no_use
from zero_sim.scenario.names import check_groups, check_spans, check_spans_begin
from zero_sim.scenario.pair import PAIR_READS, check_pair
from zero_sim.scenario.reload import check_after_reload, check_async_steps
from zero_sim.scenario.spec import FaultSpec, Scenario
from zero_sim.scenario.suggest import closest
from zero_sim.scenario.texts import check_texts

WORLD_SIZE_MAX = 4096
"""Most ranks in a world. More rank threads are a slip, not a test."""
_BARE_MODELS = ("params", "bit-hash")
PARAM_ELEMS_MAX = 2**30
"""Most elements in a `params` model: its fp32 masters and reference alone then take 8 GiB."""
SHAPES_MAX = 10_000
"""Most params in a `params` model."""
DIMS_MAX = 16
"""Most dimensions per param."""
ENTRIES_MAX = 1_000
"""Most entries in every other list."""
# (2 - 2^-23) x 2^127: a full 24-bit significand at the largest exponent.
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""Largest fp32 number. Optimizers combine their settings with fp32 numbers, so settings must be
finite in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Range of a number. An omitted field is in range."""

    path: str
    least: int | float
    most: int | float
    open_least: bool = False
    """True if `least` is excluded."""
    open_most: bool = False
    """True if `most` is excluded."""

    def holds(self, value: float) -> bool:
        """Return True if a finite value is in range."""
        above = value > self.least if self.open_least else value >= self.least
        return above and (value < self.most if self.open_most else value <= self.most)

    def in_words(self) -> str:
        """Return the range in words, for a message."""
        low = f"more than {self.least}" if self.open_least else f"at least {self.least}"
        return f"{low} and {'less than' if self.open_most else 'at most'} {self.most}"


BOUNDS = (
    # Sizes. Upper limits catch slips; `check_costs` limits their products.
    Bound(path="model.hidden", least=1, most=8_192),
    Bound(path="model.blocks", least=1, most=10_000),
    Bound(path="model.experts", least=1, most=10_000),
    Bound(path="data.rows", least=1, most=2**20),
    Bound(path="data.epoch_steps", least=2, most=10**6),
    Bound(path="data.nan.element", least=0, most=2**63 - 1),
    Bound(path="world.size", least=1, most=WORLD_SIZE_MAX),
    Bound(path="topology.tp", least=1, most=WORLD_SIZE_MAX),
    Bound(path="topology.cp", least=1, most=WORLD_SIZE_MAX),
    Bound(path="topology.pp", least=1, most=WORLD_SIZE_MAX),
    Bound(path="topology.ep", least=1, most=WORLD_SIZE_MAX),
    Bound(path="system.bucket_elems", least=1, most=PARAM_ELEMS_MAX),
    Bound(path="system.reduce_buffer_elems", least=1, most=PARAM_ELEMS_MAX),
    Bound(path="system.step_buffer_elems", least=1, most=PARAM_ELEMS_MAX),
    Bound(path="system.gather_chunk_elems", least=1, most=PARAM_ELEMS_MAX),
    Bound(path="system.prefetch", least=0, most=PARAM_ELEMS_MAX),
    Bound(path="system.align_elems", least=1, most=2**16),
    Bound(path="system.align_bytes", least=1, most=2**16),
    Bound(path="system.redundancy", least=1, most=WORLD_SIZE_MAX),
    Bound(path="optimizer.warmup_steps", least=0, most=10**9),
    Bound(path="optimizer.clip_norm", least=0, most=FP32_MAX, open_least=True),
    Bound(path="optimizer.clip_value", least=0, most=FP32_MAX, open_least=True),
    Bound(path="optimizer.loss_scale.growth_interval", least=1, most=2**31 - 1),
    Bound(path="reload.async_steps", least=0, most=10**6),
    Bound(path="reload.lost_steps", least=0, most=10**6),
    Bound(path="reload.lost_micro_batches", least=0, most=10**6),
    Bound(path="reload.world_size", least=1, most=WORLD_SIZE_MAX),
    Bound(path="reload.ep", least=1, most=WORLD_SIZE_MAX),
    Bound(path="reload.redundancy", least=1, most=WORLD_SIZE_MAX),
    Bound(path="reload.bucket_elems", least=1, most=PARAM_ELEMS_MAX),
    Bound(path="reload.reduce_buffer_elems", least=1, most=PARAM_ELEMS_MAX),
    Bound(path="pair.world_size", least=1, most=WORLD_SIZE_MAX),
    Bound(path="pair.redundancy", least=1, most=WORLD_SIZE_MAX),
    Bound(path="pair.bucket_elems", least=1, most=PARAM_ELEMS_MAX),
    # With learning rate 0, no param would change.
    Bound(path="optimizer.lr", least=0, most=FP32_MAX, open_least=True),
    Bound(path="optimizer.betas", least=0, most=1, open_most=True),
    Bound(path="optimizer.eps", least=0, most=FP32_MAX),
    Bound(path="optimizer.weight_decay", least=0, most=FP32_MAX),
    Bound(path="optimizer.momentum", least=0, most=FP32_MAX),
    Bound(path="run.steps", least=1, most=10**6),
    Bound(path="run.micro_batches", least=1, most=10**5),
    Bound(path="run.own_micro_batches", least=0, most=10**5),
    # Seeds and indices: TOML integers have 64 bits.
    Bound(path="run.seed", least=0, most=2**63 - 1),
    Bound(path="run.stall_seconds", least=0.001, most=10**6),
    Bound(path="expect.accuracy_min", least=0, most=1),
    Bound(path="expect.nonzero_min", least=0, most=1),
)
ITEM_BOUNDS = (
    # A group's learning rate may be 0, because other groups still train.
    Bound(path="optimizer.groups.lr", least=0, most=FP32_MAX),
    Bound(path="optimizer.groups.weight_decay", least=0, most=FP32_MAX),
    Bound(path="faults.call", least=0, most=10**9),
    Bound(path="faults.call_stop", least=1, most=10**9),
    Bound(path="faults.element", least=0, most=PARAM_ELEMS_MAX - 1),
    # The widest dtype has 64 bits.
    Bound(path="faults.bit", least=0, most=63),
)
"""Ranges for fields in list entries."""
LISTS = {
    # A stranger's file must not make messages or checks arbitrarily long.
    "model.shapes": SHAPES_MAX,
    "model.tied": ENTRIES_MAX,
    "model.unused": ENTRIES_MAX,
    "model.skip": ENTRIES_MAX,
    "model.one_rank": ENTRIES_MAX,
    "model.freeze": ENTRIES_MAX,
    "topology.shared": ENTRIES_MAX,
    "topology.tied": ENTRIES_MAX,
    "optimizer.groups": ENTRIES_MAX,
    "system.options": ENTRIES_MAX,
    "run.own_micro_batches": ENTRIES_MAX,
    "faults": ENTRIES_MAX,
}
"""Most entries, by list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule over several fields."""

    reads: tuple[str, ...]
    """Paths of all fields that the rule reads."""
    check: Callable[[Scenario], Iterator[Problem]]


def check_scenario(scenario: Scenario, *, known_bad: Collection[str] = ()) -> list[Problem]:
    """Check a scenario whose types are right.

    Args:
        scenario: The case to check.
        known_bad: Paths already reported. Rules that read any are skipped.

    Returns:
        Problems in field order; empty for a valid scenario.
    """
    problems: list[Problem] = []
    # Ranges first, because conditions expect numbers in range.
    for bound in (*BOUNDS, *ITEM_BOUNDS):
        if not _touches((bound.path,), known_bad):
            problems.extend(_check_bound(bound, scenario))
    for rule in RULES:
        if not _touches(rule.reads, known_bad):
            problems.extend(rule.check(scenario))
    # Estimating costs needs numbers that are in range.
    return problems or ([] if known_bad else list(check_costs(scenario)))


def _touches(reads: Iterable[str], known_bad: Collection[str]) -> bool:
    return any(
        # A rule that reads a table reads its fields, and vice versa.
        path == bad or path.startswith(f"{bad}.") or bad.startswith(f"{path}.")
        for path in reads
        for bad in known_bad
    )


def _check_bound(bound: Bound, scenario: Scenario) -> Iterator[Problem]:
    for path, number in values_at(scenario, bound.path):
        # An omitted field is None.
        if not isinstance(number, int | float):
            continue
        if not (math.isfinite(number) and bound.holds(number)):
            yield Problem(
                path=path,
                message=f"expected {_kind(number)} {bound.in_words()}, "
                f"got {describe_value(number)}.",
                suggestion=_for_bound(bound, number),
            )


def _kind(number: float) -> str:
    if not isinstance(number, float):
        return "an integer"
    # TOML has inf and nan, for which a range alone would confuse.
    return "a number" if math.isfinite(number) else "a finite number"


def _for_bound(bound: Bound, number: float) -> str:
    # An optimizer's range ends are seldom useful, so suggest a usual value.
    if bound.path.startswith("optimizer."):
        # torch's defaults if there are any.
        usual = {
            "optimizer.lr": "0.001",
            "optimizer.betas": "0.9",
            "optimizer.eps": "1e-8",
            "optimizer.clip_norm": "1.0",
            "optimizer.clip_value": "1.0",
            "optimizer.warmup_steps": "0",
            "optimizer.loss_scale.growth_interval": "2000",
        }
        return f"Try {usual.get(bound.path, '0.0')}."
    over = number > bound.most
    if bound.path == "run.stall_seconds":
        return "Try 60.0."
    return f"Try {bound.most if over else bound.least}."


def _lists(scenario: Scenario) -> Iterator[Problem]:
    for path, most in LISTS.items():
        # An omitted list has one value, None.
        count = sum(1 for _, entry in values_at(scenario, path) if entry is not None)
        if count > most:
            yield Problem(
                path=path,
                message=f"expected at most {most:,} entries, got {count:,}.",
                suggestion="Try fewer.",
            )


def _shapes(scenario: Scenario) -> Iterator[Problem]:
    model = scenario.model
    if model.name in _BARE_MODELS and model.shapes is None:
        yield Problem(
            path="model.shapes",
            message=f"missing; model '{model.name}' needs an array of arrays of integers, one per "
            "param.",
            suggestion="Try shapes = [[3], [2, 4]].",
        )


def _dims(scenario: Scenario) -> Iterator[Problem]:
    elems = 0
    negative = False
    for index, shape in enumerate(scenario.model.shapes or ()):
        if len(shape) > DIMS_MAX:
            yield Problem(
                path=f"model.shapes[{index}]",
                message=f"expected at most {DIMS_MAX} dimensions, got {len(shape):,}.",
                suggestion="Try fewer.",
            )
        for axis, dim in enumerate(shape):
            if dim < 0:
                negative = True
                yield Problem(
                    path=f"model.shapes[{index}][{axis}]",
                    message=f"expected an integer at least 0, got {describe_value(dim)}.",
                    suggestion="Try 0 for an empty param.",
                )
        elems += math.prod(shape)
    # A product with negative dimensions, which are reported above, has no meaning.
    if not negative and elems > PARAM_ELEMS_MAX:
        yield Problem(
            path="model.shapes",
            message=f"expected at most {PARAM_ELEMS_MAX:,} elements in all, got {elems:,}.",
            suggestion="Try smaller shapes: a few elements are enough to find faults in a layout.",
        )


def _nan_step(scenario: Scenario) -> Iterator[Problem]:
    nan, steps = scenario.data.nan, scenario.run.steps
    if nan is not None:
        of = f"run.steps = {steps}"
        yield from check_index("data.nan.step", nan.step, stop=steps, of=of, counted="steps")


def _nan_rank(scenario: Scenario) -> Iterator[Problem]:
    nan = scenario.data.nan
    if nan is not None:
        # A reload may change the world size before the NaN's step.
        size = world_size_at(scenario, step=nan.step)
        source = "world.size" if size == scenario.world.size else "reload.world_size"
        of = f"{source} = {size}"
        yield from check_index("data.nan.rank", nan.rank, stop=size, of=of, counted="ranks")


def _nan_micro_batch(scenario: Scenario) -> Iterator[Problem]:
    nan, count = scenario.data.nan, scenario.run.micro_batches
    if nan is not None:
        of, path = f"run.micro_batches = {count}", "data.nan.micro_batch"
        yield from check_index(path, nan.micro_batch, stop=count, of=of, counted="micro-batches")


def _faults(scenario: Scenario) -> Iterator[Problem]:
    for index, fault in enumerate(scenario.faults):
        path = f"faults[{index}]"
        size = scenario.world.size
        of = f"world.size = {size}"
        yield from check_index(f"{path}.rank", fault.rank, stop=size, of=of, counted="ranks")
        yield from _fault_call(path, fault)
        yield from _fault_place(path, fault)


def _fault_call(path: str, fault: FaultSpec) -> Iterator[Problem]:
    # A slow rank is slow during the whole run, so it has no call.
    if fault.kind == "slow":
        position = (("call", fault.call != 0), ("at", fault.at != "call"))
        given = [*position, ("call_stop", fault.call_stop), ("collective", fault.collective)]
        for name, is_given in given:
            if is_given:
                yield Problem(
                    path=f"{path}.{name}",
                    message="a slow rank is slow during the whole run, so it has no call, got "
                    f"{describe_value(getattr(fault, name))}.",
                    suggestion="Leave it out.",
                )
        return
    if fault.at == "call" and fault.call_stop is not None:
        yield Problem(
            path=f"{path}.call_stop",
            message=f"only a drawn call has a range, got {describe_value(fault.call_stop)}.",
            suggestion='Leave it out, or write at = "random".',
        )
    elif fault.at == "random" and (fault.call_stop is None or fault.call_stop <= fault.call):
        got = "nothing" if fault.call_stop is None else describe_value(fault.call_stop)
        yield Problem(
            path=f"{path}.call_stop",
            message=f"expected an integer more than call = {fault.call}, got {got}.",
            suggestion=f"Try {max(fault.call, 0) + 10}.",
        )


def _fault_place(path: str, fault: FaultSpec) -> Iterator[Problem]:
    if fault.kind != "corrupt":
        for name, default in (("side", "send"), ("element", None), ("bit", None)):
            value = getattr(fault, name)
            if value != default:
                yield Problem(
                    path=f"{path}.{name}",
                    message=f"only kind 'corrupt' has this field, got {describe_value(value)} "
                    f"with kind '{fault.kind}'.",
                    suggestion='Leave it out, or write kind = "corrupt".',
                )


def _finding(scenario: Scenario) -> Iterator[Problem]:
    wanted = scenario.expect.finding
    known = (*Check, *dict.fromkeys(check.area for check in Check))
    if wanted is not None and wanted not in known:
        # Similar names come from checks and areas, because both are valid.
        near = closest(wanted, known)
        yield Problem(
            path="expect.finding",
            message=f"expected a check or an area of checks, one of {', '.join(known)}; "
            f"got {describe_value(wanted)}.",
            suggestion=f"Did you mean '{near}'?" if near else "Try 'equality.grad', or 'equality'.",
        )


def _pair(scenario: Scenario) -> Iterator[Problem]:
    return iter(()) if scenario.pair is None else check_pair(scenario)


def _applies(row: Applies, scenario: Scenario) -> Iterator[Problem]:
    # A setting with an effect only after the checkpoint is valid.
    return row.check(scenario) if has_no_use(row, scenario) else iter(())


# Fields in rules that are checked again after the checkpoint.
_BEFORE_AND_AFTER = (
    "reload",
    *(read for each in (*APPLIES, *CONDITIONS) if each.holds_after for read in each.reads),
)
RULES = (
    # Without `reads`, so never skipped: messages print strings even if other fields are invalid.
    Rule(reads=(), check=check_texts),
    Rule(reads=tuple(LISTS), check=_lists),
    Rule(reads=("model.name", "model.shapes"), check=_shapes),
    Rule(reads=("model.shapes",), check=_dims),
    Rule(
        reads=(
            *("model.name", "model.shapes", "model.tied"),
            *("model.unused", "model.skip", "model.one_rank"),
        ),
        check=check_readers,
    ),
    Rule(
        reads=("model.one_rank", "world.size", "topology", "reload", "run.micro_batches"),
        check=check_one_rank,
    ),
    Rule(reads=("data.nan.step", "run.steps"), check=_nan_step),
    Rule(reads=("data.nan", "world.size", "reload"), check=_nan_rank),
    Rule(reads=("data.nan.micro_batch", "run.micro_batches"), check=_nan_micro_batch),
    Rule(reads=("model.freeze", "model.skip"), check=check_spans),
    Rule(reads=("optimizer.groups", "optimizer.name"), check=check_groups),
    Rule(
        reads=("world.order_known", "reload", "model.name", "topology.tp", "topology.pp"),
        check=check_order_known,
    ),
    Rule(reads=("faults", "world.size"), check=_faults),
    Rule(reads=("expect.finding",), check=_finding),
    Rule(reads=("model.freeze", "model.skip", "run.steps"), check=check_spans_begin),
    Rule(reads=_BEFORE_AND_AFTER, check=check_after_reload),
    Rule(reads=("reload.async_steps", "reload.step", "run.steps"), check=check_async_steps),
    Rule(reads=PAIR_READS, check=_pair),
    *(Rule(reads=row.reads, check=partial(_applies, row)) for row in APPLIES),
    *(Rule(reads=each.reads, check=each.check) for each in CONDITIONS),
)
