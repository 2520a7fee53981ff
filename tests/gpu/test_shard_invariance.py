"""Optimizers: an element gets the same bits for every start of its shard."""

import pytest
import torch

KERNELS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}
ELEMS = 1000


def stepped(values, grads, kernel):
    param = torch.nn.Parameter(values)
    optimizer = torch.optim.AdamW([param], lr=0.01, **KERNELS[kernel])
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("kernel", KERNELS)
def test_adamw_gives_same_bits_at_every_offset(device, kernel):
    if kernel == "fused" and device != "cuda":
        pytest.skip("has no fused optimizers")
    generator = torch.Generator().manual_seed(0)
    values, *grads = (torch.randn(ELEMS, generator=generator).to(device) for _ in range(4))
    whole = stepped(values.clone(), [grad.clone() for grad in grads], kernel)
    for offset in range(65):
        # Views into one buffer have the unaligned addresses of shards.
        own, *own_grads = (each.clone()[offset:] for each in (values, *grads))
        assert torch.equal(stepped(own, own_grads, kernel), whole[offset:]), offset
