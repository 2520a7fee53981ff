"""Names of modules that a rank numbers differently, recognised by their initial params.

A rank with experts 4 to 7 may name them `experts.0` to `experts.3`. If a param has the bits of
exactly one param of the expected run, under another name, its module gets that name. All params in
the module follow, because params of zeros or ones cannot be recognised by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def other_prefixes(own: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the expected prefix for each prefix that a rank names differently.

    `own` and `known` are digests of initial params by name, on this rank and in the expected run.

    Returns:
        Expected prefix by the rank's prefix; empty if names are equal or a match is uncertain.
    """
    counts = Counter(known.values())
    # Params with equal values, such as zeros, identify no module.
    unique = {digest: name for name, digest in known.items() if counts[digest] == 1}
    found: dict[str, str] = {}
    for name, digest in own.items():
        if digest not in unique:
            continue
        mine, theirs = _without_common_end(name, unique[digest])
        # Without a common end, the params themselves are named differently, so no module is.
        if found.setdefault(mine, theirs) != theirs or (mine and unique[digest] == theirs):
            return {}
    found.pop("", None)  # Params with the same name.
    # Two modules of one rank must not get the same name.
    names = {renamed(name, found) for name in own}
    return found if len(names) == len(own) else {}


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the longest known prefix of a name."""
    parts = name.split(".")
    # Longest first, because an inner module may be renumbered as well.
    for count in range(len(parts), 0, -1):
        if (other := prefixes.get(".".join(parts[:count]))) is not None:
            return ".".join((other, *parts[count:]))
    return name


def _without_common_end(one: str, other: str) -> tuple[str, str]:
    ones, others = one.split("."), other.split(".")
    while ones and others and ones[-1] == others[-1]:
        ones.pop(), others.pop()
    return ".".join(ones), ".".join(others)
