"""Hooks on modules and autograd: the params of each module, and the start of its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn


def find_users(module: nn.Module) -> dict[nn.Module | None, list[nn.Parameter]]:
    """Return the params that each module's forward may read, by module.

    These are its own params, and the params of containers below it that have no forward, such as
    `nn.ParameterList`. Params without a module with a forward above them are under the key None.
    """
    users: dict[nn.Module | None, list[nn.Parameter]] = {}
    seen: set[tuple[nn.Module, nn.Module | None]] = set()

    def visit(member: nn.Module, above: nn.Module | None) -> None:
        user = member if _has_forward(member) else above
        # A shared module can appear below several users; visit it once for each.
        if (member, user) in seen:
            return
        seen.add((member, user))
        # MultiheadAttention reads its output projection's params without calling that module.
        reads_below = isinstance(member, nn.MultiheadAttention)
        users.setdefault(user, []).extend(member.parameters(recurse=reads_below))
        for child in member.children():
            visit(child, user)

    visit(module, None)
    return users


def _has_forward(module: nn.Module) -> bool:
    # `nn.Module.forward` only raises. Some code sets a forward on the instance.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def on_gradients_of(output: object, call: Callable[[Tensor], None]) -> None:
    """Register `call` for the gradient of each tensor in a forward's output.

    Args:
        output: A module's output: a tensor, or tuples, lists and dicts of tensors.
        call: Receives the gradient. Not called for a tensor that is itself a param.
    """
    # grad_fn is None for leaves. A param that a module returns has no backward in this module.
    for tensor in _tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(call)


# Does not look into other containers, such as dataclasses.
def _tensors_in(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors_in(value)
