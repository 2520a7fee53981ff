"""Modules for FSDP: children to wrap separately, and fp32 params."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from zero_sim.errors import Problem
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import UPSTREAM


def called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each child that can be wrapped separately.

    The child must train params, have a forward, before which FSDP gathers them, and share no param
    with another part of the model.
    """
    # torch requires that modules with a shared param have a common wrapper, so leave these children
    # to the whole model's wrapper.
    own = list(module.parameters(recurse=False))
    own += [param for child in module.children() for param in child.parameters()]
    places = Counter(map(id, own))
    for name, child in module.named_children():
        # A container's forward is never called, so its wrapper would never gather.
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        params = list(child.parameters())
        is_apart = all(places[id(param)] == 1 for param in params)
        if is_called and is_apart and any(param.requires_grad for param in params):
            yield name, child


def widen_params(module: nn.Module) -> None:
    """Replace a module's params by fp32 params, which a mixed-precision policy narrows later.

    Tied params stay tied.
    """
    # Replacing `.data` is not enough: the param would still accumulate gradients in its old dtype.
    wide: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in tuple(module.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        # A tied param occurs under several names, which must share the new param.
        if param not in wide:
            wide[param] = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        setattr(module.get_submodule(owner), last, wide[param])


def stale_after_evaluation(scenario: Scenario) -> Iterator[Problem]:
    """Yield a problem if a forward may leave unsharded params that only a backward frees.

    Call it for cases in which params stay unsharded after a forward.
    """
    # scenarios/upstream/torch-fsdp2-evaluation.
    if scenario.run.evaluate == "within-step":
        yield Problem(
            path="run.evaluate",
            message="params that stay unsharded after a forward under no_grad are outdated after "
            f"the optimizer's step, got 'within-step'. {UPSTREAM}",
            suggestion="Try 'between-steps'.",
        )
