"""Coverage of a campaign as text and data: drawn features, and features that mutants need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from zero_sim.fuzz.coverage import Coverage, Pair, pairs_of
from zero_sim.report.amounts import aligned
from zero_sim.untrusted import printable

_PAIRS_SHOWN = 15
# Report a missing pair if at least this many cases were expected. Below, absence means nothing.
_EXPECTED_MIN = 1.0


def render_coverage(
    coverage: Coverage, *, names: Sequence[str], finders: Mapping[str, frozenset[str]]
) -> str:
    """Render features, features never drawn, feature pairs, and an outlook for further cases.

    Args:
        coverage: Coverage of a campaign.
        names: Features that its cases can have, in row order.
        finders: Features of the smallest case that finds a mutant, by mutant id.
    """
    if not coverage.cases:
        return "Coverage: no case was drawn."
    parts = [
        _features(coverage, names=names, finders=finders),
        _never(coverage, names=names),
        _pairs_never(coverage, names=names, finders=finders),
        _pairs_that_found(coverage, finders=finders),
        _outlook(coverage),
    ]
    return printable("\n\n".join(part for part in parts if part), lines=True)


def coverage_data(
    coverage: Coverage, *, names: Sequence[str], finders: Mapping[str, frozenset[str]]
) -> dict[str, object]:
    """Return the same data with all pairs, ready for JSON; arguments as for `render_coverage`."""
    found = {id: map(_joined, pairs_of(features)) for id, features in finders.items()}
    return {
        **coverage.as_dict(),
        "features_never": coverage.never(names),
        "pairs": {_joined(pair): count for pair, count in sorted(coverage.pairs.items())},
        "pairs_never": {_joined(pair): expected for pair, expected in coverage.pairs_never(names)},
        "mutants": len(finders),
        "mutants_by_feature": _ids_by(finders),
        "mutants_by_pair": _ids_by(found),
    }


def _ids_by(found: Mapping[str, Collection[str] | map[str]]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for id, names in sorted(found.items()):
        for name in names:
            ids.setdefault(name, []).append(id)
    return dict(sorted(ids.items()))


def _features(
    coverage: Coverage, *, names: Sequence[str], finders: Mapping[str, frozenset[str]]
) -> str:
    """Return a table of features: cases, other features met, and mutants."""
    # Each pair counts once for each of its features.
    others = Counter(chain.from_iterable(coverage.pairs))
    mutants = Counter(chain.from_iterable(finders.values()))
    rows = [["feature", "cases", "share", "met with", "mutants"]]
    for name in dict.fromkeys((*names, *sorted(coverage.features))):
        count = coverage.features[name]
        share = f"{count / coverage.cases:.1%}"
        rows.append([name, f"{count:,}", share, str(others[name]), str(mutants[name] or "-")])
    return (
        f"Features of {_many(coverage.cases, 'case')}, with the number of other features met and "
        f"of mutants\n(of {len(finders)}) whose smallest case has the feature:\n{aligned(rows)}"
    )


def _never(coverage: Coverage, *, names: Sequence[str]) -> str:
    never = coverage.never(names)
    return "Never drawn: " + (", ".join(never) or "none; every feature was") + "."


def _pairs_never(
    coverage: Coverage, *, names: Sequence[str], finders: Mapping[str, frozenset[str]]
) -> str:
    never = coverage.pairs_never(names)
    head = (
        f"{_many(len(coverage.pairs), 'pair')} of features met; {len(never):,} other pairs of "
        "drawn features did not,\nand many of these are impossible."
    )
    # The expected count assumes that both features are independent.
    unexpected = [(pair, count) for pair, count in never if count >= _EXPECTED_MIN]
    if not unexpected:
        return head
    found = _mutants_of_pairs(finders)
    rows = [["expected", "mutants", "never drawn"]]
    rows += [
        [f"{count:.1f}", str(found[pair] or "-"), _joined(pair)]
        for pair, count in unexpected[:_PAIRS_SHOWN]
    ]
    return (
        f"{head} {len(unexpected):,} would be expected if features were independent;\n"
        f"expected cases, the most first:\n{aligned(rows, words=(2,))}"
    )


def _pairs_that_found(coverage: Coverage, *, finders: Mapping[str, frozenset[str]]) -> str:
    """Return a table of pairs that occur in mutants' smallest cases, least drawn first."""
    found = _mutants_of_pairs(finders)
    if not found:
        return ""
    # A rarely drawn pair that many mutants need is a gap in the generator.
    seldom = sorted(found, key=lambda pair: (coverage.pairs[pair], -found[pair], pair))
    rows = [["cases", "mutants", "seldom drawn"]]
    rows += [
        [f"{coverage.pairs[pair]:,}", str(found[pair]), _joined(pair)]
        for pair in seldom[:_PAIRS_SHOWN]
    ]
    never = sum(pair not in coverage.pairs for pair in found)
    return (
        f"{_many(len(found), 'pair')} occur in smallest cases that find a mutant; {never} of them "
        f"were never drawn.\nThe least drawn:\n{aligned(rows, words=(2,))}"
    )


def _outlook(coverage: Coverage) -> str:
    # Good and Turing: the share of cases with a unique pair estimates the share of further cases
    # with a new pair. Chao: a lower bound for the number of unseen pairs.
    outlook = coverage.outlook
    if outlook is None:
        return ""
    alone = round(outlook.new_share * coverage.cases)
    return (
        f"Not yet covered: {alone:,} of {_many(coverage.cases, 'case')} had a pair that no other "
        f"case had, so about {outlook.new_share:.0%} of further\ncases will have a new pair, "
        f"{outlook.new_pairs:.2g} new pairs per case at first (Good and Turing). At least about "
        f"{outlook.pairs_left_min:,} possible\npairs have not been met (Chao)."
    )


def _mutants_of_pairs(finders: Mapping[str, frozenset[str]]) -> Counter[Pair]:
    return Counter(chain.from_iterable(map(pairs_of, finders.values())))


def _joined(pair: Pair) -> str:
    return " + ".join(pair)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
