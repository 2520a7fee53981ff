"""torch's FullyShardedDataParallel (FSDP1) with a plain torch optimizer.

A module's params are padded to 16 bytes each and concatenated to a flat param, which is cut evenly
over the ranks.
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
    plain_optimizer,
    reduced_grads,
)
from zero_sim.targets.torch.wrapping import called_children, stale_after_evaluation, widen_params

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# By `system.stage`. FSDP1 has no stage 1, which would keep whole gradients.
_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
# By stage, for `system.redundancy` above 1.
_HYBRID = {2: "_HYBRID_SHARD_ZERO2", 3: "HYBRID_SHARD"}
# Names of torch's BackwardPrefetch. Option `none` has no entry, because None turns prefetching off.
_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}


class FSDP1Engine:
    """FullyShardedDataParallel on a rank, with a unit for each child with params and for the rest.

    16-bit params are sharded in fp32 and gathered in 16 bits.
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
        # Before wrapping, because flat params keep their dtype, and masters must be fp32.
        widen_params(module)
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        chosen = {
            **self._settings(options),
            **_sharding(scenario.system, group=group, device=device),
        }
        # Before wrapping, which turns params into 1D views of this rank's shards.
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        with warnings.catch_warnings():
            # torch warns that DDP will replace NO_SHARD, and that a single rank uses it.
            warnings.simplefilter("ignore")
            # Children first, because the root's flat param takes all remaining params.
            for name, child in called_children(module):
                setattr(module, name, FullyShardedDataParallel(child, **chosen))
            self._fsdp: FullyShardedDataParallel = FullyShardedDataParallel(module, **chosen)
        self.module: nn.Module = self._fsdp
        # With `use_orig_params`, these are views of this rank's shards of flat params.
        self._params = {name: param for name, param in self._named() if name in self._shapes}
        self._optimizer = plain_optimizer(scenario.optimizer, self._params)
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._spec = scenario.optimizer
        self._reduced: dict[str, Tensor] = {}

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

        prefetch = _PREFETCH.get(options["backward_prefetch"])
        return {
            # Otherwise the optimizer gets flat params, whose names match no param group.
            "use_orig_params": True,
            "mixed_precision": MixedPrecision(
                param_dtype=None if self._dtype is torch.float32 else self._dtype,
                reduce_dtype=_DTYPES.get(options["reduce_dtype"]),
                # Batches already have the dtypes that the bare model takes.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "backward_prefetch": None if prefetch is None else BackwardPrefetch[prefetch],
            "forward_prefetch": options["forward_prefetch"],
            "limit_all_gathers": options["limit_all_gathers"],
        }

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._fsdp.named_parameters():
            # Each wrapper adds this prefix, but the judge uses the bare model's names.
            yield name.replace("_fsdp_wrapped_module.", ""), param

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients unsharded and local, unless this micro-batch reduces them."""
        if not (last or self._syncs_every):
            self._unsynced.enter_context(self._fsdp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, during which gradients are reduced."""
        # Exits `no_sync` afterwards, if `start_micro_batch` entered it.
        with self._unsynced:
            loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip if the scenario does, and update the shards."""
        # Read gradients before clipping, which writes to them.
        grads = {name: param.grad for name, param in self._params.items()}
        known = {name: grad for name, grad in grads.items() if grad is not None}
        self._reduced = reduced_grads(self._spec, known)
        norm = None
        if self._spec.clip_norm is not None:
            # The wrapper's method, because the norm needs all ranks' shards.
            norm = self._fsdp.clip_grad_norm_(self._spec.clip_norm)
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def params(self) -> Mapping[str, Tensor]:
        """Return gathered working params, in forward's dtype."""
        # Copies, because gathered memory is freed when the context exits.
        with self._fsdp_type.summon_full_params(self._fsdp, writeback=False):
            return {
                name: param.detach().to(self._dtype, copy=True)
                for name, param in self._named()
                if name in self._shapes
            }

    def parts(self) -> Iterator[OwnedPart]:
        """Yield the part of each param in this rank's shards of flat params."""
        # From a param's id to its range in the shard, which FSDP1 does not expose publicly.
        held = {}
        for unit in self._fsdp_type.fsdp_modules(self._fsdp):
            flat: Any = unit._handle.flat_param if unit._handle is not None else None
            if flat is not None:
                held |= dict(zip(map(id, flat._params), flat._shard_param_infos, strict=True))
        for name, param in self._params.items():
            info = held[id(param)]
            # Flat params are cut anywhere, so this rank may have no element of a param.
            if not info.in_shard:
                continue
            # The end is inclusive.
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
    """Return FSDP1's arguments for device, ranks and sharding strategy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    blocks = system.redundancy
    if blocks == 1:
        strategy = ShardingStrategy[_STRATEGIES[system.stage]]
        return {"device_id": device, "process_group": group, "sharding_strategy": strategy}
    # Mesh rows are shard groups, so each shard group has consecutive ranks.
    shape, names = (blocks, group.size() // blocks), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    strategy = ShardingStrategy[_HYBRID[system.stage]]
    return {"device_id": device, "device_mesh": mesh, "sharding_strategy": strategy}


def predivide_factor(ranks: int) -> float:
    """Return the power of two by which FSDP1 divides before the sum."""
    # As in torch/distributed/algorithms/_comm_hooks/default_hooks.py: near the square root of the
    # number of ranks, so that gradients do not underflow before the sum, nor the sum overflow.
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


class TorchFSDP1:
    """FullyShardedDataParallel, with fp32 masters.

    Args:
        as_is: True to also accept cases that are known to go wrong.
    """

    capabilities = Capabilities(
        stages=(0, 2, 3),
        dtypes=("fp32", "bf16"),
        scalar_params=False,
        # Flat params are cut anywhere, but muon and lamb need whole params.
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
        """Return the arithmetic of a case."""
        ranks = scenario.world.size
        # FSDP1 makes no gradients for empty params, so torch takes the norm over fewer params,
        # which has other bits.
        has_empty = any(0 in shape for shape in scenario.model.shapes or ())
        whole = "reported" if has_empty else "of-params"
        reduce: Any = chosen_options(self, scenario)["reduce_dtype"]
        every = scenario.system.sync == "every"
        return Numerics(
            # Each rank divides by a power of two, a reduce-scatter sums, and the sum is divided by
            # the rest, all in `reduce_dtype`. With HSDP both divisors still count all ranks, and
            # the second division follows the last sum.
            divide="post-rounded",
            divide_by="ranks",
            predivide_by=predivide_factor(ranks),
            divide_each="round" if every else "step",
            grad_dtype="param",
            # Under `no_sync`, micro-batches accumulate in the dtype of forward's params. With
            # `every`, sums are cast to fp32 and then added.
            accumulate_dtype="fp32" if every else "param",
            reduce_dtype=reduce,
            reported_grads="after-division",
            reported_dtype="fp32",
            # Without sharding, FSDP1 calls `torch.nn.utils.clip_grad_norm_`.
            norm=whole if _is_whole(scenario) else "of-own-params",
            clip="fp32-reciprocal",
        )

    def refuses(self, scenario: Scenario) -> Iterator[Problem]:
        """Yield fields of a case that have no rule or are known to go wrong."""
        every = scenario.system.sync == "every"
        if _is_whole(scenario) and every and scenario.run.micro_batches > 1:
            yield Problem(
                path="system.sync",
                message="without sharding, FSDP1 sums earlier micro-batches over the ranks again, "
                "for which no rule can be declared.",
                suggestion="Try sync = 'last', or one micro-batch.",
            )
        if scenario.model.nested and any(0 in shape for shape in scenario.model.shapes or ()):
            yield Problem(
                path="model.nested",
                message="FSDP1 raises if a wrapped module has no elements, got true with an empty "
                "param.",
                suggestion="Remove it, or the empty param.",
            )
        if not self._as_is:
            yield from _known_to_go_wrong(scenario)

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP1Engine:
        """Shard the module for training on this rank."""
        options = chosen_options(self, scenario)
        return FSDP1Engine(module, scenario=scenario, group=group, options=options)


_READS_ROOT = ("gpt", "transformer-260")
"""Models whose blocks have no wrapper of their own, so the root's wrapper has their params."""


def _is_whole(scenario: Scenario) -> bool:
    # FSDP1 switches to NO_SHARD on a single rank.
    return scenario.system.stage == 0 or scenario.world.size == 1


def _known_to_go_wrong(scenario: Scenario) -> Iterator[Problem]:
    # scenarios/upstream/torch-fsdp1-tied-accumulated.
    narrow, accumulates = scenario.model.dtype != "fp32", scenario.run.micro_batches > 1
    tied = ("head.weight",) if scenario.model.name == "gpt" else scenario.model.tied
    if _is_whole(scenario) and narrow and tied and accumulates:
        yield Problem(
            path="model.tied" if scenario.model.tied else "model.name",
            message="without sharding, FSDP1 in torch 2.13 raises when it assigns an earlier "
            "micro-batch's 16-bit gradient to the other name of a tied fp32 param, got "
            f"{', '.join(map(repr, tied))}. {UPSTREAM}",
            suggestion="Try fp32, or one micro-batch.",
        )
    if scenario.model.recompute == "reentrant" and scenario.model.name in _READS_ROOT:
        yield Problem(
            path="model.recompute",
            message="FSDP1 in torch 2.13 raises, or loses earlier micro-batches' gradients, if a "
            "reentrant checkpoint reads params of an outer module, got 'reentrant' with "
            f"model {scenario.model.name!r}.",
            suggestion="Try 'non-reentrant', or model 'mlp'.",
        )
    if not _is_whole(scenario):
        yield from stale_after_evaluation(scenario)
    # scenarios/upstream/torch-fsdp1-hybrid-alone.
    replicas = scenario.system.redundancy
    if 1 < replicas == scenario.world.size:
        yield Problem(
            path="system.redundancy",
            message="torch 2.13 reduces nothing with HYBRID_SHARD if a shard group has one rank, "
            f"got {replicas} shard groups. {UPSTREAM}",
            suggestion="Try stage 0, or fewer replicas than ranks.",
        )


TARGETS = (TorchFSDP1(), TorchFSDP1(as_is=True))
