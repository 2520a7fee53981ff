"""DeepSpeed's engine on a rank: its config, and where gradients, masters and state are.

[Note: universal checkpoints]
They have a folder for each param with its whole fp32 master, `exp_avg` and `exp_avg_sq`, and a file
with the optimizer's settings. Any number of ranks can load them. DeepSpeed's script converts no
other state.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import CheckpointForm, OptimizerSpec, Scenario
from zero_sim.targets.protocol import OwnedPart, Place, Settings, StepResult
from zero_sim.targets.torch.optim import LearningRates, flat_state, plain_optimizer

_ALL = 500_000_000
"""Bucket size that holds any model here."""


def config_of(scenario: Scenario, *, stage: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's config for a case."""
    system = scenario.system
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": bool(system.overlap_grads),
        "reduce_scatter": system.sum_by == "reduce-scatter",
        "contiguous_gradients": system.contiguous_grads,
        "reduce_bucket_size": system.reduce_buffer_elems or system.bucket_elems or _ALL,
        "allgather_bucket_size": 2 * (system.gather_chunk_elems or _ALL),  # an even number
        "stage3_param_persistence_threshold": 0 if system.reshard_after_forward else _ALL,
        "stage3_prefetch_bucket_size": _ALL if system.prefetch is None else system.prefetch,
        # If True, stage 3 replaces torch's linear for the rest of the process.
        "memory_efficient_linear": False,
    }
    wire, wide = options["communication"], options.get("accumulation", "param")
    return {
        **_half(scenario),
        **({} if wire == "param" else {"communication_data_type": wire}),
        **({"checkpoint": {"load_universal": True}} if options.get("universal") else {}),
        **({} if wide == "param" else {"data_types": {"grad_accum_dtype": wide}}),
        "gradient_predivide_factor": options.get("predivide", 1.0),
        "prescale_gradients": options.get("prescale", False),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": scenario.run.micro_batches,
        # Always set, because the default is 1.0.
        "gradient_clipping": scenario.optimizer.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def _half(scenario: Scenario) -> dict[str, Any]:
    if scenario.model.dtype != "fp16":
        return {"bf16": {"enabled": True}} if scenario.model.dtype == "bf16" else {}
    # DeepSpeed always scales losses in fp16; a static scale of 1 changes nothing.
    half: dict[str, Any] = {"enabled": True, "loss_scale": 1.0}
    scale = scenario.optimizer.loss_scale
    if scale is not None:
        half |= {
            "loss_scale": 0,
            "initial_scale_power": int(math.log2(scale.initial)),
            # Minus 1, because DeepSpeed's scale first grows one step after its window.
            "loss_scale_window": max(1, scale.growth_interval - 1),
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    return {"fp16": half}


_TAG, _UNIVERSAL = "saved", "universal"


class DeepSpeedEngine:
    """DeepSpeed's engine on a rank."""

    def __init__(self, module: nn.Module, *, spec: OptimizerSpec, config: dict[str, Any]) -> None:
        deepspeed = import_deepspeed()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._client = plain_optimizer(spec, trained)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._client,
            config=config,
            dist_init_required=False,
        )
        self.module: nn.Module = self._engine
        self._params = trained
        stage = config["zero_optimization"]["stage"]
        self._parts = parts_of(
            stage, optimizer=self._optimizer, client=self._client, params=trained
        )
        self._rates = LearningRates(self._client)
        self._is_gathered = stage == 3
        self._scales = spec.loss_scale is not None
        self._clips = spec.clip_norm is not None
        self._is_universal = "checkpoint" in config
        self._reduced: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Reset gradients of an unfinished step; the engine's `step` resets all others."""
        self._engine.zero_grad()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward for one micro-batch."""
        # Scenarios do not divide losses by the number of micro-batches.
        self._engine.backward(loss, scale_wrt_gas=False)
        # DeepSpeed counts micro-batches by calls to its `step`, and updates in the last call.
        if not last_micro:
            self._engine.step()

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params."""
        # Read gradients and scale first, because the engine's `step` changes both.
        self._reduced = self._parts.gradients()
        scale = getattr(self._optimizer, "loss_scale", 1.0) if self._scales else None
        self._rates.scale(lr_factor)
        self._engine.step()
        skipped = bool(getattr(self._optimizer, "overflow", False))
        # Infinite for a skipped step, even if a gradient was NaN.
        norm = self._engine.get_global_grad_norm() if self._clips else None
        return StepResult(
            norm=None if norm is None else torch.as_tensor(norm).float(),
            skipped=skipped,
            loss_scale=scale,
        )

    def params(self) -> Mapping[str, Tensor]:
        """Return whole working params, which stage 3 gathers."""
        if not self._is_gathered:
            return {name: param.detach() for name, param in self._params.items()}
        # Copies, because params are resharded when the context exits.
        with import_deepspeed().zero.GatheredParameters(list(self._params.values())):
            return {name: param.detach().clone() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """Yield this rank's parts of masters and state."""
        yield from self._parts.owned(self._reduced)

    def settings(self) -> Settings:
        """Return the loss scale and the steps since its last overflow."""
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if not self._scales or scaler is None:
            return Settings(params={})
        # `cur_iter` counts steps, but `last_overflow_iter` is an index, -1 at first.
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return Settings(params={}, loss_scale=scaler.cur_scale, good_steps=good_steps)

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint; with option `universal`, the first rank converts it."""
        self._engine.save_checkpoint(str(path), tag=_TAG)
        if self._is_universal:
            # The conversion needs all ranks' files, and no rank may load before it ends.
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                convert(path / _TAG, path / _UNIVERSAL)
            torch.distributed.barrier()

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Load a checkpoint."""
        tag = _UNIVERSAL if self._is_universal else _TAG
        self._engine.load_checkpoint(str(path), tag=tag, load_optimizer_states=not weights_only)


def import_deepspeed() -> Any:
    """Import DeepSpeed for the CPU, without kernels that it would have to compile."""
    # DeepSpeed calls deprecated torch functions in every step.
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated", FutureWarning)
    import deepspeed  # pyrefly: ignore

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its shared-memory reduction takes half a minute to compile, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed requires oneDNN kernels for fp16, but torch also computes in fp16 without them.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


class Parts(Protocol):
    """A stage's gradients, masters and state."""

    def gradients(self) -> dict[str, Tensor]:
        """Return 1-D copies of reduced gradients; called right before a step."""
        ...

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """Yield parts with masters, state and these gradients."""
        ...


def parts_of(stage: int, *, optimizer: Any, client: Any, params: Mapping[str, Any]) -> Parts:
    """Return the parts of a stage."""
    if stage == 0:
        return WholeParts(optimizer, client, params)
    return (FragmentParts if stage < 3 else ShardParts)(optimizer, client, params)


class WholeParts:
    """Stage 0: whole params, with fp32 copies of 16-bit params."""

    def __init__(self, optimizer: Any, client: Any, params: Mapping[str, nn.Parameter]) -> None:
        self._client, self._params = client, params
        # From a 16-bit param's id to its fp32 copy; empty in fp32, which has no copies.
        copies = {
            id(param): copy
            for group in zip(
                getattr(optimizer, "fp16_groups", ()),
                getattr(optimizer, "fp32_groups", ()),
                strict=True,
            )
            for param, copy in zip(*group, strict=True)
        }
        self._masters = {name: copies.get(id(param), param) for name, param in params.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the params' gradients."""
        return {
            name: (torch.zeros_like(param) if param.grad is None else param.grad.clone()).flatten()
            for name, param in self._params.items()
        }

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """Yield all params whole."""
        for name, master in self._masters.items():
            yield OwnedPart(
                place=Place(param=name, start=0, stop=master.numel()),
                grad=gradients.get(name),
                master=master.detach().reshape(-1),
                state=flat_state(self._client.state.get(master, {})),
            )


class FragmentParts:
    """Stages 1 and 2: param fragments in this rank's partition of each group's flat buffer."""

    def __init__(self, optimizer: Any, client: Any, params: Mapping[str, Any]) -> None:
        self._optimizer, self._client, self._params = optimizer, client, params

    def _mapped(self) -> Iterator[tuple[str, Any, Any]]:
        # DeepSpeed sets `_hp_mapping` on a param if this rank has a fragment of it.
        for name, param in self._params.items():
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is not None:
                yield name, param, mapping

    def gradients(self) -> dict[str, Tensor]:
        """Return gradient fragments."""
        return {
            name: mapping.get_lp_grad_fragment(param._index_in_param_group).flatten().clone()
            for name, param, mapping in self._mapped()
        }

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """Yield this rank's fragments."""
        for name, _, mapping in self._mapped():
            # Ranges in the param and in the flat fp32 partition.
            part, own = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            yield OwnedPart(
                place=Place(param=name, start=part.start, stop=part.start + part.numel),
                grad=gradients.get(name),
                master=mapping.hp_fragment.detach().reshape(-1),
                state=_state_in(self._client.state.get(flat, {}), own.start, own.numel),
            )


class ShardParts:
    """Stage 3: this rank's part of each flattened param, of equal length on all ranks, padded."""

    def __init__(self, optimizer: Any, client: Any, params: Mapping[str, Any]) -> None:
        self._optimizer, self._client, self._params = optimizer, client, params
        self._rank = torch.distributed.get_rank()

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradient parts, in fp32."""
        import deepspeed.utils  # pyrefly: ignore

        return {
            name: deepspeed.utils.safe_get_local_grad(param)
            .flatten()[: self._own_elems(param)]
            .clone()
            for name, param in self._params.items()
        }

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """Yield this rank's parts."""
        optimizer = self._optimizer
        for name, param in self._params.items():
            count, start = self._own_elems(param), param.ds_tensor.ds_numel * self._rank
            start = min(start, param.ds_numel)
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield OwnedPart(
                place=Place(param=name, start=start, stop=start + count),
                grad=gradients.get(name),
                master=flat.detach()[offset : offset + count],
                state=_state_in(self._client.state.get(flat, {}), offset, count),
            )

    def _own_elems(self, param: Any) -> int:
        # Without padding.
        part = param.ds_tensor.ds_numel
        return max(0, min(part, param.ds_numel - part * self._rank))


def _state_in(state: Mapping[str, Any], start: int, count: int) -> dict[str, Tensor]:
    return {
        key: value if not value.dim() else value[start : start + count]
        for key, value in flat_state(state).items()
    }


def convert(saved: Path, universal: Path) -> None:
    """Convert a saved checkpoint to a universal checkpoint. Call it on a single rank.

    Args:
        saved: Checkpoint folder, including the tag.
        universal: Folder to write.
    """
    from deepspeed.checkpoint import ds_to_universal  # pyrefly: ignore

    arguments = Namespace(
        input_folder=str(saved),
        output_folder=str(universal),
        # A single worker runs in this process.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # Only Megatron-DeepSpeed and AutoTP write this state, so let the script add it.
        inject_missing_state=True,
    )
    # The script prints its progress.
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        ds_to_universal.main(arguments)
