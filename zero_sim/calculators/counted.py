"""Input for the closed forms: param sizes, or only their number, with a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from zero_sim.cost.forms import ParamSize
from zero_sim.errors import UsageError
from zero_sim.scenario.fitting import fitted_to_stage
from zero_sim.scenario.spec import (
    DtypeName,
    ModelSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)

BUCKETS_MAX = 100_000
"""Maximum number of buckets in a counted model. More are a typing mistake, and slow."""

# torch's dtype name, and bytes per element.
_DTYPES: Final[Mapping[DtypeName, tuple[str, int]]] = {
    "fp32": ("torch.float32", 4),
    "bf16": ("torch.bfloat16", 2),
    "fp16": ("torch.float16", 2),
}
Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model and its sharding, as far as costs depend on them."""

    sizes: tuple[ParamSize, ...]
    """Params in registration order. A counted model has a single param with all elements."""
    scenario: Scenario
    """Training settings; `world.size` is the size of a dp-cp group."""
    counted: bool = False
    """True if only the number of params is known."""
    imported: bool = False
    """True for a user's module, which comes without data and loss."""

    @property
    def elems(self) -> int:
        """Number of elements in all params."""
        return sum(size.elems for size in self.sizes)

    def laid_out(self) -> tuple[ParamSize, ...]:
        """Return the params for the closed forms. A counted model has a param per bucket.

        Raises:
            UsageError: If there are more than `BUCKETS_MAX` buckets.
        """
        system = self.scenario.system
        # Without buckets, reduce buffers limit how many elements are reduced together.
        bucket = system.bucket_elems or system.reduce_buffer_elems
        if not self.counted or bucket is None or not self.sizes:
            return self.sizes
        # Costs depend on bucket sizes, not on the params inside, so a param per bucket is enough.
        # The last bucket has the remainder.
        (whole,) = self.sizes
        count, rest = divmod(whole.elems, bucket)
        if count > BUCKETS_MAX:
            raise UsageError(
                f"expected at most {BUCKETS_MAX:,} buckets, got {count:,} of {bucket:,} elements. "
                f"Try --bucket-elems {max(1, whole.elems // 1000)}."
            )
        elems = [bucket] * count + ([rest] if rest else [])
        return tuple(
            replace(whole, name=f"{whole.name}.{index}", elems=each)
            for index, each in enumerate(elems)
        )

    def with_choice(
        self,
        *,
        ranks: int | None = None,
        stage: Stage | None = None,
        redundancy: int | None = None,
        **system: Any,
    ) -> Model:
        """Return the same model with other ranks or other sharding.

        Args:
            ranks: Size of the dp-cp group.
            stage: ZeRO stage.
            redundancy: Replicas of the sharded state.
            system: Other fields of `SystemSpec`.

        Raises:
            UsageError: If redundancy or expert parallelism does not divide the ranks.
        """
        scenario = self.scenario
        size = scenario.world.size if ranks is None else ranks
        chosen: dict[str, Any] = dict(system)
        if stage is not None:
            chosen["stage"] = stage
        if redundancy is not None:
            chosen["redundancy"] = redundancy
        built = replace(scenario.system, **chosen)
        ep = scenario.topology.ep
        check_ranks(size, redundancy=built.redundancy, stage=built.stage, ep=ep)
        # Drop settings that the new stage cannot have, so that a table can compare stages.
        built = fitted_to_stage(replace(scenario, system=built)).system
        # Only stages 1 and 2 gather params after the step, so only they can overlap these gathers.
        if built.stage not in (1, 2) and built.overlap_params:
            built = replace(built, overlap_params=None)
        is_buffered = built.stage == 2 and built.reduce_buffer_elems is not None
        # With one micro-batch both values of `sync` reduce at the same time.
        if is_buffered and scenario.run.micro_batches == 1:
            built = replace(built, sync="every")
        _check_reduce_buffers(built)
        world = replace(scenario.world, size=size)
        return replace(self, scenario=replace(scenario, world=world, system=built))


def check_ranks(ranks: int, *, redundancy: int, stage: int, ep: int = 1) -> None:
    """Check that ranks divide into `redundancy` shard groups.

    Raises:
        UsageError: If they do not, or stage 0 is combined with redundancy.
    """
    # Experts are sharded only over ranks with the same experts: `ranks // ep` ranks.
    if ranks % ep or ranks // ep % redundancy:
        of = f", {ranks // ep} for each set of experts" if ep > 1 else ""
        raise UsageError(
            f"expected a redundancy that divides the {ranks} ranks{of}, got {redundancy}. "
            f"Try --redundancy 1."
        )
    if not stage and redundancy > 1:
        raise UsageError(
            f"expected redundancy 1 with stage 0, because it shards nothing, got {redundancy}. "
            "Try --stage 1."
        )


def _check_reduce_buffers(system: SystemSpec) -> None:
    if system.reduce_buffer_elems is None:
        return
    if system.redundancy > 1:
        raise UsageError(
            "expected redundancy 1 with reduce buffers, because they do not add across replicas, "
            f"got {system.redundancy}. Try --redundancy 1."
        )
    if system.stage == 2 and system.sync == "last":
        raise UsageError(
            "expected sync = 'every' with reduce buffers at stage 2, because no gradient stays for "
            "the next micro-batch, got 'last'. Try --stage 1 or --micro-batches 1, or change "
            "system.sync in the scenario."
        )


def counted_model(
    elems: int, *, dtype: DtypeName, system: SystemSpec | None = None, ranks: int = 1
) -> Model:
    """Return a model of which only number and dtype of params are known.

    Args:
        elems: Number of params.
        dtype: Dtype of params, and of gradients unless `system` sets another.
        system: Sharding; by default `SystemSpec()`.
        ranks: Size of the dp-cp group.
    """
    name, each = _DTYPES[dtype]
    size = ParamSize(
        name="params",
        kind="dense",
        dtype=name,
        elems=elems,
        param_bytes=each,
        grad_bytes=each,
        grad_dtype=name,
    )
    scenario = Scenario(
        schema=1,
        name=f"{elems:,} params",
        model=ModelSpec(name="params", dtype=dtype),
        world=WorldSpec(size=ranks),
        system=system or SystemSpec(),
    )
    return Model(sizes=(size,), scenario=scenario, counted=True)
