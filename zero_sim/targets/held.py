"""Which memory the project's own system holds, found by following its references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_sim.zero import DistributedDataParallel, DistributedOptimizer

_OWN_MODULES = "zero_sim.zero"


def held_bytes(ddp: DistributedDataParallel, optimizer: DistributedOptimizer) -> Mapping[str, int]:
    """Return the bytes of all memory that an engine reaches, each once, by what it is for.

    What nobody named is `other`: whatever a later change keeps alive is found without a word here.
    The module's own tensors and scalars do not count.

    Args:
        ddp: The module and its buffers.
        optimizer: Their masters and state.
    """
    named: dict[int, str] = {}
    for buffer in ddp.buffers:
        for name, memory in (
            ("gradients", buffer.grad_data),
            ("sums", buffer.total_data),
            ("params", buffer.param_data),
        ):
            if memory is not None:
                named[_address(memory)] = name
    named |= {_address(shard): "masters" for shard in optimizer.master_shards.values()}
    for state in optimizer.inner.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                named.setdefault(_address(value), "state")
    own = {_address(tensor) for tensor in ddp.module.buffers()}
    own |= {_address(param) for param in ddp.module.parameters()}
    held = dict.fromkeys(("gradients", "sums", "params", "masters", "state", "other"), 0)
    seen: set[int] = set()
    for tensor in _tensors([ddp, optimizer]):
        address = _address(tensor)
        is_foreign = address in own and address not in named
        if address in seen or is_foreign or (tensor.dim() == 0 and address not in named):
            continue
        seen.add(address)
        # Counters are 0D and do not grow with the model.
        if tensor.dim() or named.get(address) != "state":
            held[named.get(address, "other")] += tensor.untyped_storage().nbytes()
    return held


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(roots: list[object]) -> Iterator[Tensor]:
    """Every tensor that can be reached without going through the module or torch itself."""
    pending, seen = list(roots), set[int]()
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, nn.Module):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.untyped_storage().nbytes():
                yield item
            pending.append(item.grad)
        else:
            pending.extend(_members(item))


def _members(item: object) -> Iterator[object]:
    match item:
        case dict():
            yield from item.keys()
            yield from item.values()
        case list() | tuple() | set() | frozenset():
            yield from item
        case Optimizer():
            yield from (item.state, item.param_groups)
        case partial():
            yield from item.args
        case _ if type(item).__module__.startswith(_OWN_MODULES):
            slots = (name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()))
            yield from (
                getattr(item, name, None) for name in (*slots, *getattr(item, "__dict__", ()))
            )
