"""Records of calls are immutable, and comparable across ranks."""

import dataclasses

import pytest
import torch

from zero_sim.sim.call import Call
from zero_sim.sim.contract.single_call import check_call


def test_call_is_frozen():
    call = Call(kind="all_reduce", inputs=[torch.zeros(2)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.line = 3


def test_check_call_returns_the_signature_to_compare():
    call = Call(
        kind="all_reduce", inputs=[torch.zeros(5)[2:]], reduce_op=torch.distributed.ReduceOp.SUM
    )
    signature = check_call(call, group_rank=0, ranks=(0, 1), strict=True)
    assert signature.offsets == (2,)
    assert signature.alike[-1] == (torch.float32, torch.Size([3]))
