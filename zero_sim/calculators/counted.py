"""Models of which only the number of params is known, as the closed forms take them.

What a bucket holds is all that costs depend on, so such a model has one param a bucket: of
`bucket_elems` elements each, and what is left in the last.
"""

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
"""More are a slip of the finger."""

_DTYPES: Final[Mapping[DtypeName, tuple[str, int]]] = {
    "fp32": ("torch.float32", 4),
    "bf16": ("torch.bfloat16", 2),
    "fp16": ("torch.float16", 2),
}
Stage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is trained, as far as costs depend on it."""

    sizes: tuple[ParamSize, ...]
    """In registration order; of a counted model as if there were no buckets."""
    scenario: Scenario
    """How; `world.size` counts the ranks of one dp-cp group."""
    counted: bool = False
    """Whether only the number of params is known."""
    imported: bool = False
    """Whether it is somebody's module, of which there is no data and no loss."""

    @property
    def elems(self) -> int:
        """Number of its params."""
        return sum(size.elems for size in self.sizes)

    def laid_out(self) -> tuple[ParamSize, ...]:
        """The params as closed forms take them: of a counted model one a bucket.

        Raises:
            UsageError: There would be very many buckets.
        """
        system = self.scenario.system
        bucket = system.bucket_elems or system.reduce_buffer_elems
        if not self.counted or bucket is None or not self.sizes:
            return self.sizes
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
        """The same model on other ranks, or sharded otherwise.

        Args:
            ranks: Of the dp-cp group.
            stage: ZeRO stage.
            redundancy: Copies of what is sharded.
            system: Other fields of `system`.

        Raises:
            UsageError: The copies do not divide the ranks, or experts do not.
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
        built = fitted_to_stage(replace(scenario, system=built)).system
        if built.stage not in (1, 2) and built.overlap_params:
            built = replace(built, overlap_params=None)
        is_buffered = built.stage == 2 and built.reduce_buffer_elems is not None
        if is_buffered and scenario.run.micro_batches == 1:
            built = replace(built, sync="every")  # Of one micro-batch the same.
        _check_reduce_buffers(built)
        world = replace(scenario.world, size=size)
        return replace(self, scenario=replace(scenario, world=world, system=built))


def check_ranks(ranks: int, *, redundancy: int, stage: int, ep: int = 1) -> None:
    """Check that ranks can be cut into as many blocks.

    Raises:
        UsageError: They cannot.
    """
    if ranks % ep or ranks // ep % redundancy:
        of = f" of {ranks // ep} that hold the same experts" if ep > 1 else ""
        raise UsageError(
            f"expected a redundancy that divides the {ranks} ranks{of}, got {redundancy}. "
            f"Try --redundancy 1."
        )
    if not stage and redundancy > 1:
        raise UsageError(
            f"expected redundancy 1 with stage 0, which shards nothing, got {redundancy}. "
            "Try --stage 1."
        )


def _check_reduce_buffers(system: SystemSpec) -> None:
    if system.reduce_buffer_elems is None:
        return
    if system.redundancy > 1:
        raise UsageError(
            f"expected redundancy 1 with reduce buffers, whose sums go on to no copies, got "
            f"{system.redundancy}. Try --redundancy 1."
        )
    if system.stage == 2 and system.sync == "last":
        raise UsageError(
            "expected sync = 'every' with reduce buffers at stage 2, where no gradient stays for "
            "the next micro-batch, got 'last'. Try --stage 1, --micro-batches 1, or system.sync in "
            "the scenario."
        )


def counted_model(
    elems: int, *, dtype: DtypeName, system: SystemSpec | None = None, ranks: int = 1
) -> Model:
    """A model of so many params of one dtype.

    Args:
        elems: Number of params.
        dtype: Of params, and of gradients unless `system` says otherwise.
        system: How they are sharded.
        ranks: Of the dp-cp group.
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
