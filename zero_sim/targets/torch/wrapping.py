"""Modules for FSDP: children that are wrapped on their own, and params in fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM


def called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every child that can be wrapped on its own.

    Such a child has params to train, a forward before which they are gathered, and no param of
    another part of the model.

    Args:
        module: The bare model.
    """
    # torch requires that all modules that share a param are wrapped as one. Such a child is left to
    # the wrapper of the whole model.
    own = list(module.parameters(recurse=False))
    own += [param for child in module.children() for param in child.parameters()]
    places = Counter(map(id, own))
    for name, child in module.named_children():
        # A container's forward is never called, so a wrapper's would not gather.
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        params = list(child.parameters())
        is_apart = all(places[id(param)] == 1 for param in params)
        if is_called and is_apart and any(param.requires_grad for param in params):
            yield name, child


def widen_params(module: nn.Module) -> None:
    """Replace the params of a module by fp32 ones, which a mixed-precision policy narrows later.

    Args:
        module: The bare model. Tied params stay tied.
    """
    # New params, because a param whose `.data` was swapped still accumulates gradients in its first
    # dtype.
    wide: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in tuple(module.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        # Tied params are one param under several names, and must stay one.
        if param not in wide:
            wide[param] = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        setattr(module.get_submodule(owner), last, wide[param])


def stale_after_evaluation(scenario: Scenario) -> Iterator[Problem]:
    """Yield the problem of FSDP, which frees the root's params only after a backward.

    Args:
        scenario: A case in which params stay whole after a forward.
    """
    # scenarios/upstream/torch-fsdp2-evaluation.
    if scenario.run.evaluate == "within-step":
        yield Problem(
            path="run.evaluate",
            message="params that a forward under no_grad leaves unsharded are outdated after the "
            f"optimizer's step, got 'within-step'. {UPSTREAM}",
            suggestion="Write 'between-steps'.",
        )
