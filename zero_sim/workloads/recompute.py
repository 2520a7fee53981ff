"""Activation checkpoints: blocks whose activations are dropped and recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_sim.scenario.spec import Recompute


def call_block(block: Callable[[Tensor], Tensor], x: Tensor, *, recompute: Recompute) -> Tensor:
    """Call a block under a checkpoint; with `none`, keep all activations."""
    # Without gradients no activations are kept anyway.
    if recompute == "none" or not torch.is_grad_enabled():
        return block(x)
    if recompute == "reentrant" and not x.requires_grad:
        # If no input requires a gradient, a reentrant checkpoint gives its params none.
        x = x.detach().requires_grad_()
    return checkpoint(block, x, use_reentrant=recompute == "reentrant")


class RecomputedBlocks(nn.Sequential):
    """Blocks in sequence, each under a checkpoint.

    Args:
        blocks: Each maps a tensor to a tensor.
        recompute: Checkpoint kind.
    """

    def __init__(self, *blocks: nn.Module, recompute: Recompute) -> None:
        super().__init__(*blocks)
        self.recompute: Recompute = recompute

    def forward(self, input: Tensor) -> Tensor:
        """Map a tensor through all blocks."""
        x = input
        for block in self:
            x = call_block(block, x, recompute=self.recompute)
        return x


def keep_activations(module: nn.Module) -> nn.Module:
    """Make a module keep all activations. This changes no bit in its results."""
    # torch.autograd.grad, which the reference calls, refuses reentrant checkpoints.
    for part in module.modules():
        if hasattr(part, "recompute"):
            vars(part)["recompute"] = "none"
    return module
