"""Named orders on a real transport: gloo or NCCL moves the data, and each rank adds by itself.

A backend's own order may be unknown, or differ between calls. So a reduction here gathers all
contributions, which rounds nothing. Then every rank adds them with the code and order of the
simulated world. This makes exact judgement possible for any program on real processes. Collectives
that only move data go to the transport unchanged.

A collective is complete when its call returns, and an asynchronous call returns finished work. On a
device, complete means enqueued on the current stream, as after NCCL's own `wait`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.backends.transport import Membership
from zero_sim.backends.transports import find_transport
from zero_sim.sim.call import Call
from zero_sim.sim.comm.collectives import PERFORM
from zero_sim.sim.comm.process_group import SimProcessGroup
from zero_sim.sim.comm.rendezvous import Group
from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.order import Order
from zero_sim.sim.order_backends import ORDERS

_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")


def folding_backend(transport: str, order: str, *, seed: int = 0) -> str:
    """Return a backend for `init_process_group` with a named summation order.

    It is registered with torch once per process.

    Args:
        transport: `gloo` or `nccl`, to move data.
        order: One of `zero_sim.sim.order_backends.ORDERS`.
        seed: Seed of an order that draws.
    """
    name = f"{transport}_{order}_{seed}".replace("-", "_")
    if not hasattr(dist.Backend, name.upper()):
        create = functools.partial(_create, transport=transport, order=ORDERS[order](seed))
        # Only this device type, so that torch also moves objects with it and passes no CPU tensor.
        devices = [find_transport(transport).device_type]
        dist.Backend.register_backend(name, create, extended_api=True, devices=devices)
    return name


def _create(options: Any, _: Any, *, transport: str, order: Order) -> SimProcessGroup:
    return make_group(options, transport=transport, order=order)


def make_group(options: Any, *, transport: str, order: Order) -> SimProcessGroup:
    """Return a process group that moves data with a transport and adds in an order."""
    carrying = find_transport(transport)
    # torch lists no ranks for the default group.
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    # The simulated world's record, so that its process group class works here.
    group = Group(options.group_id, members, label=options.group_id)
    inner = carrying.make_group(
        Membership(
            store=dist.PrefixStore("transport", options.store),
            rank=options.group_rank,
            ranks=members,
            name=options.group_id,
            timeout=options.timeout,
        )
    )
    device = carrying.device or torch.device(carrying.device_type)
    carrier = _Carrier(inner, order, rank=members[options.group_rank], device=device)
    return SimProcessGroup(carrier, group, options.group_rank)


def _outputs_of(call: Call, rank: int) -> list[Tensor]:
    """Allocate a rank's outputs. List entries may differ in length."""
    if call.kind == "reduce_scatter_list":
        return [torch.empty_like(call.inputs[rank])]
    return [torch.empty_like(output) for output in call.outputs]


class _DoneWork(dist.Work):
    """Finished work."""

    def __init__(self, tensors: Sequence[Tensor], source: int = -1) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._source = source

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        # With devices, because callbacks must run on streams that see the written data.
        devices = {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
        future: torch.futures.Future = torch.futures.Future(
            devices=sorted(devices, key=str) or None
        )
        # Finished already, so callbacks run at once.
        future.set_result(self._tensors)
        return future

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class _Carrier:
    """Cluster protocol on a real transport, with a named order."""

    def __init__(self, inner: Any, order: Order, *, rank: int, device: torch.device) -> None:
        self._inner = inner
        self._rank = rank
        self._order = order
        self.device = device
        """Device of the data it moves."""

    def issue(self, group: Group, group_rank: int, call: Call, *, asynchronous: bool) -> dist.Work:
        """Perform a rank's side of a collective to its end."""
        self._check(call.kind, *call.inputs, *call.outputs)
        if call.kind == "barrier":
            _barrier(self._inner, self.device)
        elif call.kind in _REDUCING:
            self._fold(call, group_rank, world_size=len(group.ranks))
        else:
            _MOVE[call.kind](self._inner, call, group_rank)
        return _DoneWork(call.outputs or call.inputs)

    def send(
        self, group: Group, group_rank: int, peer: int, *, tag: int, tensor: Tensor
    ) -> dist.Work:
        """Send a tensor. Return once it is on its way."""
        self._check("send", tensor)
        return self._inner.send([tensor.contiguous()], peer, tag)

    def receive(
        self, group: Group, group_rank: int, peer: int | None, *, tag: int, tensor: Tensor
    ) -> dist.Work:
        """Receive a tensor."""
        self._check("receive", tensor)
        if peer is None:
            # From any rank, as for `dist.recv` without a source.
            return self._inner.recv_anysource([tensor], tag)
        return self._inner.recv([tensor], peer, tag)

    def join_works(
        self, rank: int, works: Sequence[dist.Work], *, result: Sequence[Any] | None = None
    ) -> dist.Work:
        """Wait for several works, and return finished work."""
        for work in works:
            work.wait()
        return _DoneWork(result or [])

    def note_destroyed(self, group: Group, group_rank: int) -> None:
        """Close a destroyed group's transport."""
        self._inner.shutdown()
        # gloo closes its connections when the object is freed.
        self._inner = None

    def device_kinds(self) -> Sequence[str]:
        """Return the transport's device type, because torch would put objects elsewhere."""
        return [self.device.type]

    def note_aborted(self, group: Group, group_rank: int) -> None:
        """Abort the transport. Do not wait for pending operations."""
        if self._inner is not None:
            self._inner.abort()
            self._inner = None

    def _check(self, kind: str, *tensors: Tensor) -> None:
        """Check that the transport can access a call's memory.

        Raises:
            ContractViolation: A tensor is on another device.
        """
        for tensor in tensors:
            if tensor.device.type != self.device.type:
                raise ContractViolation(
                    f"expected {kind} with tensors on {self.device.type}, got a tensor of shape "
                    f"{tuple(tensor.shape)} on {tensor.device}, whose memory this backend cannot "
                    f"move. Move it to {self.device} first.",
                    aspect="device",
                    rank=self._rank,
                    other_rank=self._rank,
                )

    def used_after_destroy(self, group: Group, group_rank: int, kind: str) -> ContractViolation:
        """Return the error for a call in a group that its member destroyed."""
        rank = group.ranks[group_rank]
        return ContractViolation(
            f"use after destroy_process_group: rank {rank} issues {kind} in group {group.label}, "
            "which it destroyed. Create the group again, or destroy it later.",
            aspect="use-after-destroy",
            rank=rank,
            other_rank=rank,
        )

    def _fold(self, call: Call, group_rank: int, *, world_size: int) -> None:
        """Add all ranks' contributions here, and keep this rank's part."""
        # [input][rank]: this input as each rank contributes it.
        gathered = [self._gather(tensor, world_size) for tensor in call.inputs]
        calls = [
            Call(
                kind=call.kind,
                inputs=[parts[rank] for parts in gathered],
                outputs=_outputs_of(call, rank),
                reduce_op=call.reduce_op,
                root=call.root,
                factor=call.factor,
            )
            for rank in range(world_size)
        ]
        # All ranks' sides at once, as in the simulated world.
        PERFORM[call.kind](calls, self._order)
        own = calls[group_rank]
        # Only the root of a reduce gets a result.
        if call.kind == "reduce" and group_rank != call.root:
            return
        # In-place collectives, such as all_reduce, have no outputs.
        results = own.outputs or own.inputs
        for tensor, result in zip(call.outputs or call.inputs, results, strict=True):
            # Into the caller's memory, because autograd and views may share it.
            tensor.copy_(result)

    def _gather(self, tensor: Tensor, world_size: int) -> list[Tensor]:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format)
                 for _ in range(world_size)]  # fmt: skip
        # Empty tensors need no call, because sizes are equal on all ranks.
        if tensor.numel():
            self._inner.allgather([parts], [tensor.contiguous()]).wait()
        return parts


def _all_gather(inner: Any, call: Call, rank: int) -> None:
    for output, value in zip(call.outputs, call.inputs, strict=True):
        if not value.numel():
            continue
        # Parts have the input's shape, but the output may be flat or stacked.
        parts = [torch.empty_like(value) for _ in range(output.numel() // value.numel())]
        inner.allgather([parts], [value.contiguous()]).wait()
        output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))


def _all_gather_list(inner: Any, call: Call, rank: int) -> None:
    world_size = inner.size()
    for i, value in enumerate(call.inputs):
        outputs = call.outputs[i * world_size : (i + 1) * world_size]
        parts = [torch.empty_like(value) for _ in outputs]
        inner.allgather([parts], [value.contiguous()]).wait()
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part.view(output.shape))


def _broadcast(inner: Any, call: Call, rank: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = call.root
    for tensor in call.inputs:
        carried = tensor.contiguous()
        inner.broadcast([carried], options).wait()
        # A strided tensor was received into its contiguous copy.
        if carried is not tensor:
            tensor.copy_(carried)


def _scatter(inner: Any, call: Call, rank: int) -> None:
    options = dist.ScatterOptions()
    options.rootRank = call.root
    # torch requires an empty list on all ranks but the root.
    parts = [[part.contiguous() for part in call.inputs]] if rank == call.root else []
    inner.scatter(list(call.outputs), parts, options).wait()


def _gather(inner: Any, call: Call, rank: int) -> None:
    options = dist.GatherOptions()
    options.rootRank = call.root
    outputs = [list(call.outputs)] if rank == call.root else []
    inner.gather(outputs, [call.inputs[0].contiguous()], options).wait()


def _all_to_all(inner: Any, call: Call, rank: int) -> None:
    # Into contiguous memory, because the output may be a strided view.
    received = torch.empty_like(call.outputs[0], memory_format=torch.contiguous_format)
    inner.alltoall_base(
        received,
        call.inputs[0].contiguous(),
        list(call.output_splits),
        list(call.input_splits),
        dist.AllToAllOptions(),
    ).wait()
    call.outputs[0].copy_(received)


def _all_to_all_list(inner: Any, call: Call, rank: int) -> None:
    """Exchange each list as one tensor, because gloo cannot exchange lists."""
    sent = torch.cat([part.reshape(-1) for part in call.inputs])
    counts = [output.numel() for output in call.outputs]
    received = sent.new_empty(sum(counts))
    inner.alltoall_base(
        received, sent, counts, [part.numel() for part in call.inputs], dist.AllToAllOptions()
    ).wait()
    for output, part in zip(call.outputs, received.split(counts), strict=True):
        output.copy_(part.view(output.shape))


def _barrier(inner: Any, device: torch.device) -> None:
    options = dist.BarrierOptions()
    if device.index is not None:
        # NCCL would guess the device from the group rank.
        options.device_ids = [device.index]
        options.device = device  # pyrefly: ignore  # torch's stub shows it as read-only.
    inner.barrier(options).wait()


_MOVE: dict[str, Callable[[Any, Call, int], None]] = {
    "all_gather": _all_gather,
    "all_gather_list": _all_gather_list,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "all_to_all": _all_to_all,
    "all_to_all_list": _all_to_all_list,
}
