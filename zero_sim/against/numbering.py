"""Names of modules that a rank numbers in its own way, found by their params' start.

A rank that holds experts 4 to 7 may call them `experts.0` to `experts.3`. If a param has
the bits that exactly one param has in the run to compare with, under another name, its module
gets that name, with all params in it: zeros and ones look like many others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def other_prefixes(own: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """One rank's prefixes, each with the prefix in the run to compare with.

    Args:
        own: Digests by name for one rank's params at their start.
        known: The same of the run to compare with.

    Returns:
        Empty if the names are the same, or if other ones are not certain.
    """
    counts = Counter(known.values())
    unique = {digest: name for name, digest in known.items() if counts[digest] == 1}
    found: dict[str, str] = {}
    for name, digest in own.items():
        if digest not in unique:
            continue
        mine, theirs = _without_common_end(name, unique[digest])
        # A name without a common end would belong to a param, and not to a module.
        if found.setdefault(mine, theirs) != theirs or (mine and unique[digest] == theirs):
            return {}
    found.pop("", None)  # The same names.
    names = {renamed(name, found) for name in own}
    return found if len(names) == len(own) else {}


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """A name with its longest known prefix exchanged."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (other := prefixes.get(".".join(parts[:count]))) is not None:
            return ".".join((other, *parts[count:]))
    return name


def _without_common_end(one: str, other: str) -> tuple[str, str]:
    ones, others = one.split("."), other.split(".")
    while ones and others and ones[-1] == others[-1]:
        ones.pop(), others.pop()
    return ".".join(ones), ".".join(others)
