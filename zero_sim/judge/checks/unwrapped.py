"""Check of an unwrapped module: only its param values may have changed.

A remaining hook would fire in later uses of the module. A param that is a view of an engine's
buffer would keep the buffer alive, and change when the buffer is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from zero_sim.findings.compare import same_bits
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check

Hook = tuple[str, str, int]
"""Owner, kind and id of a hook. Ids are unique in the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNote:
    """Structure of a module."""

    classes: Mapping[str, type[nn.Module]]
    attributes: Mapping[str, frozenset[str]]
    """Names in `__dict__`, by module or param."""
    params: Mapping[str, nn.Parameter]
    hooks: frozenset[Hook]


def note_module(module: nn.Module) -> ModuleNote:
    """Record the structure of a module."""
    # With duplicates, because a tied param has several names.
    modules = dict(module.named_modules(remove_duplicate=False))
    params = dict(module.named_parameters(remove_duplicate=False))
    everything: dict[str, object] = {f"module {name!r}": each for name, each in modules.items()}
    everything |= {f"param {name!r}": each for name, each in params.items()}
    return ModuleNote(
        classes={name: type(each) for name, each in modules.items()},
        attributes={name: frozenset(vars(each)) for name, each in everything.items()},
        params=params,
        hooks=_hooks_on(modules, params),
    )


def hooks_of(module: nn.Module) -> frozenset[Hook]:
    """Return all hooks on a module, its submodules and their params."""
    return _hooks_on(
        dict(module.named_modules(remove_duplicate=False)),
        dict(module.named_parameters(remove_duplicate=False)),
    )


def _hooks_on(
    modules: Mapping[str, nn.Module], params: Mapping[str, nn.Parameter]
) -> frozenset[Hook]:
    found: set[Hook] = set()
    for name, each in modules.items():
        attributes = vars(each)
        # torch keeps hooks in dicts by id. Empty dicts are default attributes.
        for kind in _hook_kinds():
            if hooks := attributes.get(kind):
                found.update((f"module {name!r}", kind, number) for number in hooks)
    for name, param in params.items():
        # Private attributes in which tensors keep hooks.
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(param, kind, None):
                found.update((f"param {name!r}", kind, number) for number in hooks)
    return frozenset(found)


@cache
def _hook_kinds() -> tuple[str, ...]:
    """Return the attributes in which this torch version keeps module hooks."""
    return tuple(kind for kind in vars(nn.Module()) if kind.endswith("_hooks"))


def check_unwrapped(
    module: nn.Module,
    before: ModuleNote,
    *,
    held: Mapping[str, Tensor],
    not_its_own: frozenset[Hook],
    step: int,
    rank: int,
) -> Iterator[Finding]:
    """Check a module that an engine has unwrapped.

    Args:
        module: Returned by the engine.
        before: Structure of the module before the engine wrapped it.
        held: Values of trained params in the engine, by name.
        not_its_own: Hooks that the harness registered.
        step: The last step, for findings.
        rank: For findings.
    """
    now = note_module(module)

    def wrong(message: str, param: str | None = None) -> Finding:
        return Finding(
            check=Check.INVARIANT_GIVEN_BACK,
            step=step,
            rank=rank,
            phase=Phase.GATHER,
            param=param,
            message=f"the unwrapped module {message}",
        )

    for whose, kind, _ in sorted(now.hooks - before.hooks - not_its_own):
        yield wrong(f"has a new hook: {kind} of {whose}")
    for whose, kind, _ in sorted(before.hooks - now.hooks):
        yield wrong(f"lacks a hook that it had before: {kind} of {whose}")
    for what, cls in before.classes.items():
        got = now.classes.get(what)
        if got is not cls:
            observed = "none" if got is None else got.__name__
            yield wrong(f"has another class in place of {cls.__name__} at {what!r}: {observed}")
    for whose in sorted(before.attributes.keys() | now.attributes.keys()):
        had, has = (each.attributes.get(whose, frozenset()) for each in (before, now))
        for name in sorted(had ^ has):
            yield wrong(f"{'lacks' if name in had else 'has a new'} attribute {name!r} of {whose}")
    yield from (wrong(*each) for each in _wrong_params(before, now, held))


def _wrong_params(
    before: ModuleNote, now: ModuleNote, held: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    # By storage address, to find params with a common storage.
    owner_of: dict[int, nn.Parameter] = {}
    for name, expected in held.items():
        param = now.params.get(name)
        if param is None or param is not before.params.get(name):
            yield "has another object in place of a param", name
            continue
        own = param.numel() * param.element_size()
        memory = param.untyped_storage()
        # Addresses of empty params have no meaning.
        shared_with = owner_of.setdefault(memory.data_ptr(), param) if own else param
        if memory.nbytes() != own or shared_with is not param:
            there = memory.nbytes()
            yield f"has a param of {own} bytes in a foreign storage of {there} bytes", name
        # Later training would accumulate into this gradient.
        if param.grad is not None:
            yield "still has a gradient of a param", name
        if param.shape != expected.shape or param.dtype != expected.dtype:
            yield f"has a param of other shape or dtype: {tuple(param.shape)}, {param.dtype}", name
        elif not same_bits(expected, param.detach()):
            yield "has other values of a param than the engine had", name
