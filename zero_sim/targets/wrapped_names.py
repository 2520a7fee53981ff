"""Names of params behind a wrapper, which adds parts to them at the front or within.

`module.up.weight` and `up._fsdp_wrapped_module.weight` are both `up.weight` of the bare model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def names_like(held: Collection[str], name: str) -> list[str]:
    """Names that may be that of a param of the bare model: it alone, if it is among them.

    Args:
        held: Names in the engine's module.
        name: The param's name in the bare model.
    """
    if name in held:
        return [name]
    wanted = name.split(".")
    return [each for each in held if _contains(each.split("."), wanted)]


def _contains(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts of a name have those of another among them, in order, the last one last."""
    rest = iter(parts)
    return parts[-1] == wanted[-1] and all(part in rest for part in wanted)
