"""Modules as FSDP is given them: which children are wrapped, and params in fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM


def called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every child that has params to train and a forward to gather them before.

    One that has a param of another part of the model, too, is left to the whole: torch wants all
    modules that share a param to be wrapped as one.

    Args:
        module: The bare model.
    """
    own = list(module.parameters(recurse=False))
    own += [param for child in module.children() for param in child.parameters()]
    places = Counter(map(id, own))
    for name, child in module.named_children():
        # What is no more than a container is never called.
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        params = list(child.parameters())
        is_apart = all(places[id(param)] == 1 for param in params)
        if is_called and is_apart and any(param.requires_grad for param in params):
            yield name, child


def widen_params(module: nn.Module) -> None:
    """Give a module params of fp32, as it is before a policy of mixed precision gathers less.

    New ones: where only the memory of a param is swapped, it goes on asking for gradients of the
    dtype that it had. One that is tied stays so.

    Args:
        module: The bare model.
    """
    wide: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in tuple(module.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        if param not in wide:
            wide[param] = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        setattr(module.get_submodule(owner), last, wide[param])


def stale_after_evaluation(scenario: Scenario) -> Iterator[Problem]:
    """Yield the problem of FSDP, which frees the root's params only after a backward.

    Args:
        scenario: A case in which params stay whole after a forward.
    """
    if scenario.run.evaluate == "within-step":
        yield Problem(
            path="run.evaluate",
            message="params that a forward under no_grad leaves whole are old ones after the "
            f"optimizer's step, got 'within-step'. {UPSTREAM}",
            suggestion="Write 'between-steps'.",
        )
