"""HTML that cannot be broken by what goes into it: every string is escaped that is not markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

from zero_sim.untrusted import printable

_VOID = frozenset({"meta", "br", "wbr", "hr"})


class Markup(str):
    """Text that is HTML already; made by `element` and `joined` only."""

    __slots__ = ()


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """An element.

    Args:
        name: Its tag.
        content: What stands in it; strings that are no markup are escaped.
        attributes: By name: a trailing underscore is dropped, others become hyphens. None leaves an
            attribute out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.removesuffix("_").replace("_", "-")}="{escaped(str(value))}"')
    if name in _VOID:
        return Markup(f"<{' '.join(words)}>")
    return Markup(f"<{' '.join(words)}>{joined(content)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Several after one another, those escaped that are no markup."""
    return Markup("".join(p if isinstance(p, Markup) else escaped(p) for p in parts))


def escaped(text: str) -> Markup:
    """A text as it is to be read; control characters, which could hide something, spelled out."""
    return Markup(html.escape(printable(text, lines=True), quote=True))
