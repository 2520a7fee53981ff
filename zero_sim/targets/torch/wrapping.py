"""Children of a module that are wrapped by themselves, as a user of FSDP would."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every child that has params to train and a forward to gather them before.

    Args:
        module: The bare model.
    """
    for name, child in module.named_children():
        # What is no more than a container is never called.
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_called and any(param.requires_grad for param in child.parameters()):
            yield name, child
