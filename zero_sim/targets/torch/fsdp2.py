"""torch's `fully_shard` (FSDP2) under a plain optimizer of torch, on a mesh where the params are.

[Note: what FSDP2 computes]
Each module that is sharded reduces the gradients of all its params in one reduce-scatter with AVG,
in fp32: a sum, then a division, `post` of the reference; but on NCCL a product with the reciprocal
before the sum, `premul`. What the sharded params hold in `.grad` is divided already. A param is
cut along its first dimension into chunks of equally many rows, the last ones shorter or empty.
Between micro-batches gradients accumulate locally, whole.

[Note: what FSDP2 computes by what it is set to]
Gradients accumulate and are reduced in `reduce_dtype`, and what came is cast to the dtype of the
sharded params, fp32. Without more it is divided by AVG. With `set_force_sum_reduction_for_comms` it
is a sum that is divided after it; with `set_gradient_divide_factor` alone PREMUL_SUM, which
multiplies before it, or AVG where the factor is the number of ranks that share what is sharded. In
fp16 a power of two is divided by before the sum, and the rest after it. With HSDP the blocks' means
are all-reduced with AVG, which are the bits of one mean where a block has a power of two of ranks.

[Note: clipping by norm]
Of sharded gradients torch takes the norm of each rank's rows, and one all-reduce adds the squares
of all of these over the ranks: `of-rows` of the reference.

[Note: params that some rank does not use]
Each rank leaves the params that its own losses do not reach out of the reduce-scatter. Where ranks
differ in that, they bring tensors of other params to one call: it fails where the sizes differ, and
where they are equal, gradients of different params are added without an error (torch 2.13, without
`reduce_scatter_unused_params`). So only models are declared of which every micro-batch uses all; a
test shows what comes of others.

[Note: what stands for what]
At stage 1 `reshard_after_forward` is left to torch, which frees no params of the root. At stage 3
`system.reshard_after_forward` stands for it, or option `reshard_ranks`, a number of neighbouring
ranks that keep params until backward. `system.prefetch` stands for how many modules are set to be
prefetched forward and backward. `system.redundancy` stands for a
mesh of two dimensions, `system.sync` for `set_requires_gradient_sync`, and `model.dtype` for
`param_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import ReloadSpec, Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, UPSTREAM, Capabilities, Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.torch.fsdp1 import predivide_factor
from zero_sim.targets.torch.fsdp2_engine import FSDP2Engine
from zero_sim.targets.torch.optim import OPTIMIZERS
from zero_sim.targets.torch.wrapping import stale_after_evaluation

_ROWS_ALONE = "its step looks at whole params, of which fully_shard gives it a rank's rows"
_DTYPES = ("fp32", "bf16", "fp16")
NUMERICS = Numerics(
    divide="avg",
    divide_by="ranks",
    sync="last",
    grad_dtype="param",
    grads_told="after-division",
    norm="of-rows",
    clip="fp32-reciprocal",
)
"""Rules of `fully_shard` on fp32 params, without options."""
_AFTER = ("avg", "post-rounded")


def numerics_with(scenario: Scenario, chosen: Any) -> Numerics:
    """Return the rules of a case.

    Args:
        scenario: As the target is given it.
        chosen: The value of each option.
    """
    in_block, reduce = chosen["all_reduce_last"], chosen["reduce_dtype"]
    # What a block summed of several micro-batches stays as it came until it is added to others.
    in_rounds = scenario.system.sync == "every" and not in_block
    division = _division(scenario, chosen)
    return replace(
        NUMERICS,
        **division,
        sync="every-in-block" if in_block else None,
        divide_each="round" if in_rounds and division["divide"] in _AFTER else "step",
        accumulate_dtype="fp32" if in_rounds else reduce,
        reduce_dtype=reduce,
        told_dtype="fp32",
    )


def reduced_in(scenario: Scenario, chosen: Any) -> str:
    """The dtype in which ranks are summed; arguments as for `numerics_with`."""
    reduce = chosen["reduce_dtype"]
    return scenario.model.dtype if reduce == "param" else reduce


def _division(scenario: Scenario, chosen: Any) -> dict[str, Any]:
    """The rules of division, by what FSDP2 hands to the collectives."""
    factor, ranks = chosen["divide_factor"], scenario.world.size
    together = ranks // scenario.system.redundancy
    by = {"divide_by": factor or "ranks"}
    if reduced_in(scenario, chosen) == "fp16":
        first = predivide_factor(factor or ranks)
        return {"divide": "post-rounded", "predivide_by": first, **by}
    if chosen["force_sum"]:
        return {"divide": "post-rounded", **by}
    if factor in (0.0, together):
        return {"divide": "avg", **by}
    # Without a collective there is no PREMUL_SUM.
    return {"divide": "pre" if together == 1 else "premul", **by}


def without_rule(scenario: Scenario, chosen: Any) -> Iterator[Problem]:
    """Yield parts of a case for which no rule can be declared; arguments as for `numerics_with`."""
    ranks, blocks = scenario.world.size, scenario.system.redundancy
    together = ranks // blocks
    reduce, factor = chosen["reduce_dtype"], chosen["divide_factor"]
    divides_in_block = not sums_plainly(scenario, chosen) and factor in (0.0, together)
    if blocks > 1 and divides_in_block and together & (together - 1):
        yield Problem(
            path="system.redundancy",
            message="FSDP2 rounds the mean of each block before it adds these, which is by no "
            f"rule that can be declared, got blocks of {together} ranks.",
            suggestion="Try blocks of 1, 2, 4 or 8, or option force_sum.",
        )
    is_narrower = reduce not in ("param", "fp32") and scenario.model.dtype == "fp32"
    if is_narrower and scenario.system.sync == "last" and scenario.run.micro_batches > 1:
        yield Problem(
            path="run.micro_batches",
            message=f"FSDP2 adds fp32 gradients, not rounded to {reduce}, to what it "
            f"accumulated in {reduce}, which is by no rule that can be declared.",
            suggestion="Try system.sync = 'every', or one micro-batch.",
        )


def divides_twice(scenario: Scenario, chosen: Any) -> bool:
    """Return True if torch 2.13 divides by the factor twice; arguments as for `numerics_with`."""
    has_all = scenario.world.size == scenario.system.redundancy
    return bool(chosen["divide_factor"]) and has_all and sums_plainly(scenario, chosen)


def sums_plainly(scenario: Scenario, chosen: Any) -> bool:
    """Return True if collectives neither divide nor multiply; arguments as for `numerics_with`."""
    return chosen["force_sum"] or reduced_in(scenario, chosen) == "fp16"


def _why_not_all_reduced_last(scenario: Scenario) -> str:
    system = scenario.system
    if system.redundancy > 1 and system.sync == "every":
        return ""
    return "no copies (system.redundancy) that are summed at every micro-batch (system.sync)"


def _why_not_left_sharded(scenario: Scenario) -> str:
    if not scenario.system.reshard_after_forward:
        return ""
    return "params that are freed after forward, which backward needs"


def _why_not_kept_by_few(scenario: Scenario) -> str:
    if scenario.system.stage == 3 and scenario.system.reshard_after_forward:
        return ""
    return "params that are freed after forward at stage 3"


def _ill_saved(reload: ReloadSpec) -> Iterator[Problem]:
    """Yield what torch's state-dict functions do to an optimizer that has no state yet."""
    if reload.early_save:
        yield Problem(
            path="reload.early_save",
            message="to have state to save, get_state_dict takes a step that counts. " + UPSTREAM,
            suggestion="Leave it out.",
        )
    if reload.lost_micro_batches and not reload.lost_steps:
        yield Problem(
            path="reload.lost_micro_batches",
            message="where params have gradients, get_state_dict makes no state to load into, and "
            "set_state_dict loads none. " + UPSTREAM,
            suggestion="Write lost_steps = 1, or leave it out.",
        )


class TorchFSDP2:
    """`fully_shard`, with fp32 masters; params, gradients and state are sharded.

    Args:
        as_is: True to accept cases that are known to go wrong, too.
    """

    capabilities = Capabilities(
        stages=(1, 3),
        dtypes=("fp32", "bf16"),
        # A scalar has no rows to deal out, and backward fails where a param has no elements.
        scalar_params=False,
        empty_params=False,
        optimizers=tuple(
            name for name in OPTIMIZERS if name not in ("rprop", *WHOLE_PARAM_OPTIMIZERS)
        ),
        why_no_optimizer=(
            ("rprop", "torch's in-place masks have no rule for sharded tensors, and raise"),
            *((name, _ROWS_ALONE) for name in WHOLE_PARAM_OPTIMIZERS),
        ),
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "model.tied",
            "model.recompute",
            "run.micro_batches",
            "system.redundancy",
            "system.reshard_after_forward",
            "system.prefetch",
            "system.sync",
            "reload",
        ),
        only=(("reload.form", ("sharded",)), ("reload.weights_only", (False,))),
    )
    options = {  # noqa: RUF012
        "reduce_dtype": Option(default="param", values=_DTYPES),
        "force_sum": Option(default=False, values=(True,)),
        "divide_factor": Option(default=0.0, values=(2.0, 3.0, 0.7)),
        "fp32_output": Option(default=False, values=(True,)),
        "cpu_offload": Option(default=False, values=(True,)),
        "unshard_in_backward": Option(default=True, values=(False,), fits=_why_not_left_sharded),
        "reshard_ranks": Option(default=0, values=(2, 3), fits=_why_not_kept_by_few),
        "kept_after_backward": Option(default=False, values=(True,)),
        "waits_at_last": Option(default=False, values=(True,)),
        "all_reduce_last": Option(default=False, values=(True,), fits=_why_not_all_reduced_last),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"torch-fsdp2{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the rules of a case."""
        chosen = chosen_options(self, scenario)
        rules = numerics_with(scenario, chosen)
        is_wide = scenario.model.dtype == "fp32" and chosen["reduce_dtype"] == "param"
        if is_wide and scenario.system.sync == "last":
            # All is fp32 then, so no dtype is declared: for those there is no bound.
            return replace(rules, accumulate_dtype=None, reduce_dtype=None, told_dtype="sum")
        return rules

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield parts of a case that are known to go wrong, or have no rule."""
        chosen: Any = chosen_options(self, scenario)
        yield from without_rule(scenario, chosen)
        is_large = scenario.model.name == "bit-hash"
        if reduced_in(scenario, chosen) == "fp16" and is_large:
            yield Problem(
                path="model.name",
                message="gradients of this model can be larger than what fp16 can be, got "
                "reduce_dtype = fp16.",
                suggestion="Try another model or reduce_dtype.",
            )
        few, shards = chosen["reshard_ranks"], scenario.world.size // scenario.system.redundancy
        if few and (few < 2 or few >= shards or shards % few):
            yield Problem(
                path="system.options",
                message=f"expected reshard_ranks to divide the {shards} ranks that shard params "
                f"together, and to be at least 2 and less than these, got {few}.",
                suggestion="Leave it out.",
            )
        if divides_twice(scenario, chosen) and not self._as_is:
            yield Problem(
                path="system.options",
                message="torch 2.13 divides twice by divide_factor where one rank has all of what "
                "is sharded: see scenarios/upstream.",
                suggestion="Leave out divide_factor, force_sum or fp16.",
            )

        if scenario.reload is not None and not self._as_is:
            yield from _ill_saved(scenario.reload)
        keeps = scenario.system.stage == 1 or not scenario.system.reshard_after_forward
        if keeps and not self._as_is:
            yield from stale_after_evaluation(scenario)

    def reduce_ops(self, scenario: Scenario) -> tuple[str, ...]:
        """Return the reduce operations of its collectives besides SUM."""
        divides = self.numerics(scenario).divide
        return {"avg": ("AVG",), "premul": ("PREMUL_SUM",)}.get(divides or "", ())

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP2Engine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP2Engine(module, scenario=scenario, group=group, options=options)


TARGETS = (TorchFSDP2(), TorchFSDP2(as_is=True))
