"""torch's FullyShardedDataParallel (FSDP1) under a plain optimizer of torch.

[Note: what FSDP1 computes]
All params of the module lie in one flat param, each behind padding to 16 bytes, cut evenly over the
ranks. Each rank divides its gradient by a power of two near the root of the number of ranks, a
reduce-scatter sums, and the sum is divided by the rest. With `NO_SHARD`, which one rank gets in any
case, an all-reduce takes the place of the reduce-scatter, and clipping is torch's own; of params
without elements FSDP1 makes no gradients, so that the norm is one of fewer params.

[Note: what FSDP1 computes by what it is set to]
Micro-batches accumulate under `no_sync` in the dtype of the params that forward has; what came of
that is cast to `reduce_dtype`, divided, summed and divided there, and cast to fp32, in which rounds
that are each reduced are added. With HSDP both parts of the division are of all ranks, and stand
before the first sum and behind the last one.

[Note: what stands for what]
The stage for the sharding strategy; `system.redundancy` for `HYBRID_SHARD`, at stage 2
`_HYBRID_SHARD_ZERO2`; `system.sync` for whether there is a `no_sync`; `model.dtype` for
`param_dtype`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.errors import Problem
from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario, SystemSpec
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, UPSTREAM, Capabilities, Numerics
from zero_sim.targets.options import Option, chosen_options
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.optim import (
    OPTIMIZERS,
    LearningRates,
    flat_state,
    grads_to_tell,
    plain_optimizer,
)
from zero_sim.targets.torch.wrapping import called_children, stale_after_evaluation, widen_params

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_HYBRID = {2: "_HYBRID_SHARD_ZERO2", 3: "HYBRID_SHARD"}
_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}


class FSDP1Engine:
    """One rank of FullyShardedDataParallel, around every child with params and what is left.

    Args:
        module: The model; its params become parts of flat ones. Those of 16 bits are sharded as
            fp32 ones and gathered as they are.
        scenario: The case; `model.dtype`, `optimizer` and `system` are read.
        group: The data-parallel group.
        options: The value of each option.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        group: ProcessGroup,
        options: Mapping[str, Any],
    ) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self._fsdp_type = FullyShardedDataParallel
        self._dtype = _DTYPES[scenario.model.dtype]
        self._syncs_every = scenario.system.sync == "every"
        widen_params(module)
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        chosen = {
            **self._settings(options),
            **_sharding(scenario.system, group=group, device=device),
        }
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        with warnings.catch_warnings():
            # That NO_SHARD is to become DDP, and is what one rank gets.
            warnings.simplefilter("ignore")
            for name, child in called_children(module):
                setattr(module, name, FullyShardedDataParallel(child, **chosen))
            self._fsdp: FullyShardedDataParallel = FullyShardedDataParallel(module, **chosen)
        self.module: nn.Module = self._fsdp
        self._params = {name: param for name, param in self._named() if name in self._shapes}
        self._optimizer = plain_optimizer(scenario.optimizer, self._params)
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._spec = scenario.optimizer
        self._reduced: dict[str, Tensor] = {}

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what every wrapper is set to, besides how it shards."""
        from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

        prefetch = _PREFETCH.get(options["backward_prefetch"])
        return {
            "use_orig_params": True,
            "mixed_precision": MixedPrecision(
                param_dtype=None if self._dtype is torch.float32 else self._dtype,
                reduce_dtype=_DTYPES.get(options["reduce_dtype"]),
                # Batches come as the bare model takes them.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch],
            "forward_prefetch": options["forward_prefetch"],
            "limit_all_gathers": options["limit_all_gathers"],
        }

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._fsdp.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), param

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients whole and local, but for the last micro-batch or where each is reduced."""
        if not (last or self._syncs_every):
            self._unsynced.enter_context(self._fsdp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        with self._unsynced:
            loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the shards."""
        grads = {name: param.grad for name, param in self._params.items()}
        known = {name: grad for name, grad in grads.items() if grad is not None}
        self._reduced = grads_to_tell(self._spec, known)
        norm = None
        if self._spec.clip_norm is not None:
            norm = self._fsdp.clip_grad_norm_(self._spec.clip_norm)
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered, in the dtype in which forward has them."""
        with self._fsdp_type.summon_full_params(self._fsdp, writeback=False):
            return {
                name: param.detach().to(self._dtype, copy=True)
                for name, param in self._named()
                if name in self._shapes
            }

    def parts(self) -> Iterator[OwnedPart]:
        """Parts of every param in this rank's even parts of the flat params."""
        held = {}
        for unit in self._fsdp_type.fsdp_modules(self._fsdp):
            flat: Any = unit._handle.flat_param if unit._handle is not None else None
            if flat is not None:
                held |= dict(zip(map(id, flat._params), flat._shard_param_infos, strict=True))
        for name, param in self._params.items():
            info = held[id(param)]
            if not info.in_shard:
                continue
            start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
            local = param.detach().reshape(-1)
            grad = self._reduced.get(name)
            yield OwnedPart(
                place=Place(param=name, start=start, stop=stop),
                grad=torch.zeros_like(local) if grad is None else grad.detach().reshape(-1),
                master=local,
                state=flat_state(self._optimizer.state.get(param, {})),
            )


def _sharding(system: SystemSpec, *, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Return the device, the ranks, and the strategy by which these shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    blocks = system.redundancy
    if blocks == 1:
        strategy = ShardingStrategy[_STRATEGIES[system.stage]]
        return {"device_id": device, "process_group": group, "sharding_strategy": strategy}
    shape, names = (blocks, group.size() // blocks), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    strategy = ShardingStrategy[_HYBRID[system.stage]]
    return {"device_id": device, "device_mesh": mesh, "sharding_strategy": strategy}


def predivide_factor(ranks: int) -> float:
    """The power of two by which FSDP1 divides before the sum, so that neither half overflows."""
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


class TorchFSDP1:
    """FullyShardedDataParallel, with fp32 masters.

    Args:
        as_is: True to accept cases that are known to go wrong, too.
    """

    capabilities = Capabilities(
        stages=(0, 2, 3),
        dtypes=("fp32", "bf16"),
        scalar_params=False,
        # Flat params are cut anywhere, where muon and lamb look at whole params.
        optimizers=tuple(name for name in OPTIMIZERS if name not in WHOLE_PARAM_OPTIMIZERS),
        follows=(
            *OPTIMIZER_SETTINGS,
            "model.tied",
            "model.recompute",
            "run.micro_batches",
            "optimizer.clip_norm",
            "system.redundancy",
            "system.sync",
        ),
    )
    options = {  # noqa: RUF012
        "reduce_dtype": Option(default="param", values=("fp32", "bf16")),
        "backward_prefetch": Option(default="pre", values=("post", "none")),
        "forward_prefetch": Option(default=False, values=(True,)),
        "limit_all_gathers": Option(default=True, values=(False,)),
    }

    def __init__(self, *, as_is: bool = False) -> None:
        self._as_is = as_is
        self.name = f"torch-fsdp1{'-as-is' if as_is else ''}"

    def numerics(self, scenario: Scenario) -> Numerics:
        """Return the rules of a case."""
        ranks = scenario.world.size
        has_empty = any(0 in shape for shape in scenario.model.shapes or ())
        whole = "told" if has_empty else "of-params"
        reduce: Any = chosen_options(self, scenario)["reduce_dtype"]
        every = scenario.system.sync == "every"
        return Numerics(
            divide="post-rounded",
            divide_by="ranks",
            predivide_by=predivide_factor(ranks),
            divide_each="round" if every else "step",
            grad_dtype="param",
            accumulate_dtype="fp32" if every else "param",
            reduce_dtype=reduce,
            grads_told="after-division",
            told_dtype="fp32",
            norm=whole if _is_whole(scenario) else "of-own-params",
            clip="fp32-reciprocal",
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield parts of a case that are known to go wrong, or have no rule."""
        every = scenario.system.sync == "every"
        if _is_whole(scenario) and every and scenario.run.micro_batches > 1:
            yield Problem(
                path="system.sync",
                message="where nothing is sharded FSDP1 sums again over the ranks what it has "
                "summed of earlier micro-batches, which is by no rule that can be declared.",
                suggestion="Try sync = 'last', or one micro-batch.",
            )
        if scenario.model.nested and any(0 in shape for shape in scenario.model.shapes or ()):
            yield Problem(
                path="model.nested",
                message="FSDP1 raises where a module that it wraps has no elements, got true with "
                "an empty param.",
                suggestion="Leave it out, or the empty param.",
            )
        if not self._as_is:
            yield from _known_to_go_wrong(scenario)

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP1Engine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP1Engine(module, scenario=scenario, group=group, options=options)


_READS_ROOT = ("gpt", "transformer-260")
"""Models whose blocks lie in no module that is wrapped by itself."""


def _is_whole(scenario: Scenario) -> bool:
    """Return True if nothing is sharded."""
    return scenario.system.stage == 0 or scenario.world.size == 1


def _known_to_go_wrong(scenario: Scenario) -> Iterator[Problem]:
    """Cases that go wrong in torch 2.13."""
    narrow, accumulates = scenario.model.dtype != "fp32", scenario.run.micro_batches > 1
    tied = ("head.weight",) if scenario.model.name == "gpt" else scenario.model.tied
    if _is_whole(scenario) and narrow and tied and accumulates:
        yield Problem(
            path="model.tied" if scenario.model.tied else "model.name",
            message="where nothing is sharded FSDP1 of torch 2.13 raises as it gives the other "
            "name of a tied fp32 param the 16-bit gradient of an earlier micro-batch, got "
            f"{', '.join(map(repr, tied))}. {UPSTREAM}",
            suggestion="Try fp32, or one micro-batch.",
        )
    if scenario.model.recompute == "reentrant" and scenario.model.name in _READS_ROOT:
        yield Problem(
            path="model.recompute",
            message="FSDP1 of torch 2.13 raises, or loses the gradient of earlier micro-batches, "
            "where a reentrant checkpoint reads params of a module around it, got 'reentrant' with "
            f"model {scenario.model.name!r}.",
            suggestion="Try 'non-reentrant', or model 'mlp'.",
        )
    if not _is_whole(scenario):
        yield from stale_after_evaluation(scenario)
    copies = scenario.system.redundancy
    if 1 < copies == scenario.world.size:
        yield Problem(
            path="system.redundancy",
            message="torch 2.13 reduces nothing with HYBRID_SHARD where a block has one rank, got "
            f"{copies} blocks. {UPSTREAM}",
            suggestion="Try stage 0, or fewer copies than ranks.",
        )


TARGETS = (TorchFSDP1(), TorchFSDP1(as_is=True))
