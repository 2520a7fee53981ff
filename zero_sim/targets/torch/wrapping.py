"""Modules as FSDP is given them: which children are wrapped, and params in fp32."""

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


def widen_params(module: nn.Module) -> None:
    """Give a module params of fp32, as it is before a policy of mixed precision gathers less.

    New ones: where only the memory of a param is swapped, it goes on asking for gradients of the
    dtype that it had.

    Args:
        module: The bare model, none of whose params has two names.
    """
    for name, param in tuple(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        wide = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        setattr(module.get_submodule(owner), last, wide)
