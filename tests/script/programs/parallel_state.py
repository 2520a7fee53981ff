"""Groups in module globals, as in frameworks for large models."""

import torch.distributed as dist

_TENSOR_GROUP = None
_DATA_GROUP = None


def initialize(tensor_size):
    global _TENSOR_GROUP, _DATA_GROUP
    assert _TENSOR_GROUP is None, "tensor model parallel group is already initialized"
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for start in range(0, world_size, tensor_size):
        ranks = range(start, start + tensor_size)
        group = dist.new_group(list(ranks))
        if rank in ranks:
            _TENSOR_GROUP = group
    for start in range(tensor_size):
        ranks = range(start, world_size, tensor_size)
        group = dist.new_group(list(ranks))
        if rank in ranks:
            _DATA_GROUP = group


def tensor_group():
    assert _TENSOR_GROUP is not None
    return _TENSOR_GROUP


def data_group():
    assert _DATA_GROUP is not None
    return _DATA_GROUP
