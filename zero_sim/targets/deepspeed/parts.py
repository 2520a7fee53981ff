"""Parts that one rank of DeepSpeed has of masters, state and reduced gradients, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_sim.targets.protocol import OwnedPart, Place
from zero_sim.targets.torch.optim import flat_state


class Parts(Protocol):
    """What a stage keeps, where it keeps it."""

    def gradients(self) -> dict[str, Tensor]:
        """Reduced gradients, copied, 1-D; asked right before a step."""
        ...

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """Masters and state with these gradients."""
        ...


def parts_of(stage: int, *, optimizer: Any, client: Any, params: Mapping[str, Any]) -> Parts:
    """What a stage tells.

    Args:
        stage: Of ZeRO.
        optimizer: DeepSpeed's.
        client: The one of torch that it steps with.
        params: What is trained, by name.
    """
    if stage == 0:
        return WholeParts(optimizer, client, params)
    return (FragmentParts if stage < 3 else ShardParts)(optimizer, client, params)


class WholeParts:
    """Stage 0: whole params; of halves an fp32 copy is stepped."""

    def __init__(self, optimizer: Any, client: Any, params: Mapping[str, nn.Parameter]) -> None:
        self._client, self._params = client, params
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
        """The params' own."""
        return {
            name: (torch.zeros_like(param) if param.grad is None else param.grad.clone()).flatten()
            for name, param in self._params.items()
        }

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """Every param whole."""
        for name, master in self._masters.items():
            yield OwnedPart(
                place=Place(param=name, start=0, stop=master.numel()),
                grad=gradients.get(name),
                master=master.detach().reshape(-1),
                state=flat_state(self._client.state.get(master, {})),
            )


class FragmentParts:
    """Stages 1 and 2: what this rank's partition of a group's flat buffer has of a param."""

    def __init__(self, optimizer: Any, client: Any, params: Mapping[str, Any]) -> None:
        self._optimizer, self._client, self._params = optimizer, client, params

    def _mapped(self) -> Iterator[tuple[str, Any, Any]]:
        for name, param in self._params.items():
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is not None:
                yield name, param, mapping

    def gradients(self) -> dict[str, Tensor]:
        """Fragments of them."""
        return {
            name: mapping.get_lp_grad_fragment(param._index_in_param_group).flatten().clone()
            for name, param, mapping in self._mapped()
        }

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """The fragments of this rank."""
        for name, _, mapping in self._mapped():
            part, own = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            yield OwnedPart(
                place=Place(param=name, start=part.start, stop=part.start + part.numel),
                grad=gradients.get(name),
                master=mapping.hp_fragment.detach().reshape(-1),
                state=_state_in(self._client.state.get(flat, {}), own.start, own.numel),
            )


class ShardParts:
    """Stage 3: this rank's even part of a flattened param, the last ones padded."""

    def __init__(self, optimizer: Any, client: Any, params: Mapping[str, Any]) -> None:
        self._optimizer, self._client, self._params = optimizer, client, params
        self._rank = torch.distributed.get_rank()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of them, which the library gives as fp32."""
        import deepspeed.utils  # pyrefly: ignore

        return {
            name: deepspeed.utils.safe_get_local_grad(param)
            .flatten()[: self._own_elems(param)]
            .clone()
            for name, param in self._params.items()
        }

    def owned(self, gradients: Mapping[str, Tensor]) -> Iterator[OwnedPart]:
        """The parts of this rank."""
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
        part = param.ds_tensor.ds_numel
        return max(0, min(part, param.ds_numel - part * self._rank))


def _state_in(state: Mapping[str, Any], start: int, count: int) -> dict[str, Tensor]:
    return {
        key: value if not value.dim() else value[start : start + count]
        for key, value in flat_state(state).items()
    }
