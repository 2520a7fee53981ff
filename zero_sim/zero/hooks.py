"""Hooks on modules and autograd: who uses which params, and when a backward comes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn


def find_users(module: nn.Module) -> dict[nn.Module | None, list[nn.Parameter]]:
    """Return by module the params that its forward may read.

    Those that it owns itself, and those of containers below it that have no forward, such as
    `nn.ParameterList`. None stands for params above which there is no module with a forward.
    """
    users: dict[nn.Module | None, list[nn.Parameter]] = {}
    seen: set[tuple[nn.Module, nn.Module | None]] = set()

    def visit(member: nn.Module, above: nn.Module | None) -> None:
        user = member if _has_forward(member) else above
        if (member, user) in seen:
            return
        seen.add((member, user))
        # Attention reads its output projection's params without calling it.
        reads_below = isinstance(member, nn.MultiheadAttention)
        users.setdefault(user, []).extend(member.parameters(recurse=reads_below))
        for child in member.children():
            visit(child, user)

    visit(module, None)
    return users


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def on_gradients_of(output: object, call: Callable[[Tensor], None]) -> None:
    """Call something once backward has the gradient of any tensor of a forward's output.

    Args:
        output: What a module returned: a tensor, or tuples, lists and dicts with some in them.
        call: Gets that gradient. A tensor that is itself a param has no backward of its own.
    """
    for tensor in _tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(call)


def _tensors_in(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors_in(value)
