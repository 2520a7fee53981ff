"""accelerate's `prepare` on a plain optimizer, under which it wraps DistributedDataParallel.

[Note: what stands for what]
`bucket_bytes`, `bucket_view`, `static_graph`, `find_unused` and `hook` are fields of
`DistributedDataParallelKwargs`. The arithmetic is DDP's, see there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.accelerate.loop import AccumulationLoop
from zero_sim.targets.accelerate.rules import too_many, why_no_mean
from zero_sim.targets.accelerate.setup import LIBRARY, RANK_LOCAL, accelerator_for
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.protocol import StepResult
from zero_sim.targets.torch.ddp import DDPEngine
from zero_sim.targets.torch.ddp_knobs import why_not_static
from zero_sim.targets.torch.optim import OPTIMIZERS, LearningRates, grads_to_tell
from zero_sim.workloads import EXACT_MODELS

_BYTES = 1 << 20


class AccelerateDDPEngine(DDPEngine):
    """One rank of a model and an optimizer as accelerate prepares them.

    Args:
        module: The model.
        scenario: The case; `optimizer` and `run.micro_batches` are read.
        group: The data-parallel group.
        options: The value of each option.
    """

    def __init__(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup, options: Any
    ) -> None:
        from accelerate import utils  # pyrefly: ignore

        self._spec = scenario.optimizer
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        handler = utils.DistributedDataParallelKwargs(
            bucket_cap_mb=options["bucket_bytes"] / _BYTES,
            gradient_as_bucket_view=options["bucket_view"],
            static_graph=options["static_graph"],
            find_unused_parameters=options["find_unused"],
            comm_hook=utils.DDPCommunicationHookType(options["hook"]),
        )
        self._loop = AccumulationLoop(
            module,
            accelerator=accelerator_for(scenario, group=group, handlers=[handler]),
            scenario=scenario,
            mean_loss=options["mean_loss"],
        )
        self.module = self._loop.module
        self._optimizer = self._loop.optimizer
        self._rates = LearningRates(self._optimizer)
        self._reduced: dict[str, Tensor] = {}

    def start_micro_batch(self, *, last: bool) -> None:
        """Begin a block of `accumulate`, which knows by itself which one is the last."""
        self._loop.start_micro_batch()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which DDP reduces."""
        self._loop.backward(loss, last=last_micro)

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the params."""
        self._reduced = grads_to_tell(self._spec, self._gradients())
        norm = self._clip()
        self._rates.scale(lr_factor)
        self._loop.step()
        return StepResult(norm=norm)

    def _clip(self) -> Tensor | None:
        spec = self._spec
        if spec.clip_value is not None:
            self._loop.clip_by_value(spec.clip_value)
        return None if spec.clip_norm is None else self._loop.clip_by_norm(spec.clip_norm)


def _why_not_compressed(scenario: Scenario) -> str:
    if scenario.model.name in EXACT_MODELS:
        return "gradients of a model that are more than fp16 holds"
    if scenario.world.size == 1 and scenario.run.micro_batches > 1:
        return "one rank by itself, which reduces what it accumulated at every micro-batch"
    return ""


class AccelerateDDP:
    """`Accelerator().prepare(model, optimizer)` on fp32 params: stage 0."""

    name = "accelerate-ddp"
    library = LIBRARY
    rank_local = RANK_LOCAL
    capabilities = Capabilities(
        stages=(0,),
        optimizers=OPTIMIZERS,
        follows=(
            *OPTIMIZER_SETTINGS,
            "optimizer.clip_norm",
            "optimizer.clip_value",
            "run.micro_batches",
            "model.distinct_start",
        ),
    )
    options = {  # noqa: RUF012
        "mean_loss": Option(default=False, values=(True,), fits=why_no_mean),
        "hook": Option(default="no", values=("fp16",), fits=_why_not_compressed),
        "bucket_bytes": Option(default=25 * _BYTES, values=(1, 40, 200)),
        "bucket_view": Option(default=False, values=(True,)),
        "static_graph": Option(default=False, values=(True,), fits=why_not_static),
        "find_unused": Option(default=False, values=(True,)),
    }

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        options = chosen_options(self, scenario)
        is_hooked = options["hook"] == "fp16"
        return Numerics(
            divide="pre" if is_hooked else "premul",
            divide_by="micro-batches" if options["mean_loss"] else "ranks",
            sync="last",
            grad_dtype="param",
            reduce_dtype="fp16" if is_hooked else None,
            told_dtype="param",
            norm="of-params",
            clip="fp32-reciprocal",
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """What of a case is by no rule that can be declared."""
        yield from too_many(scenario)

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> AccelerateDDPEngine:
        """Prepare the module for training on this rank."""
        options = chosen_options(self, scenario)
        return AccelerateDDPEngine(module, scenario=scenario, group=group, options=options)
