"""Words of the project: beginnings of docstrings, retired identifiers and the glossary."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "zero_sim").rglob("*.py"))

HEADLESS = ("From", "How", "Tells", "What", "When", "Where", "Whether", "Which", "Who", "Why")
"""First words of module docstrings that lack a noun."""

RETIRED = frozenset({
    "carriage", "crew", "crews", "excused", "flight", "flights", "holders", "leg", "legs", "lent",
    "lifeline", "loan", "mail", "meetings", "nursery", "owing", "pace", "paces", "panel", "seat",
    "seats", "sight", "sights", "strike", "strikes", "tallies", "tally", "trades", "untold",
})  # fmt: skip
"""House words replaced by those of the field in `docs/words.md`."""

ELSEWHERE = {
    # The plain word, for holders of references and units.
    "zero_sim/cost": {"holders"},
    "zero_sim/findings": {"holders"},
    "zero_sim/fuzz": {"holders"},
    "zero_sim/checkpoint": {"holders"},
    "zero_sim/zero": {"holders"},
    "zero_sim/mutants": {"holders"},
}

TERMS_MAX = 80


def name_of(path):
    return str(path.relative_to(ROOT))


def found_in_modules(find):
    """Return the modules for which `find(source)` is not empty, with its result."""
    found = {name_of(path): find(path.read_text()) for path in MODULES}
    return {name: those for name, those in found.items() if those}


def test_every_module_docstring_begins_with_a_noun():
    def headless(source):
        first = (ast.get_docstring(ast.parse(source)) or "(no docstring)").split()[0]
        return [first] if first in HEADLESS or first == "(no" else []

    assert found_in_modules(headless) == {}


def test_no_args_line_only_repeats_the_name():
    empty = r"(?m)^\s+\w+: (?:(?:It|Those|That)|The (?:call|case|group|path|rank|scenario|step))\.$"
    assert found_in_modules(lambda source: re.findall(empty, source)) == {}


def test_no_identifier_uses_a_retired_word():
    found = {}
    for path in MODULES:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        names = {token.string.strip("_").lower() for token in tokens if token.type == tokenize.NAME}
        room = "/".join(name_of(path).split("/")[:2])
        found[name_of(path)] = names & (RETIRED - ELSEWHERE.get(room, set()))
    assert {name: words for name, words in found.items() if words} == {}


def test_the_glossary_is_short_and_defines_each_term_once():
    rows = re.findall(r"(?m)^\| (\*\*.*?) \|", (ROOT / "docs/words.md").read_text())
    terms = [term for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row)]
    assert 0 < len(terms) <= TERMS_MAX
    assert len(set(terms)) == len(terms)


def test_only_one_module_recognises_expert_params():
    knowing = [name_of(path) for path in MODULES if re.search(r'"experts" in', path.read_text())]
    assert knowing == ["zero_sim/scenario/kinds.py"]


def test_no_error_uses_but_got():
    def but_got(source):
        raised = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
        texts = (
            each.value
            for node in raised
            for each in ast.walk(node)
            if isinstance(each, ast.Constant)
        )
        return [text for text in texts if re.search(r"\bbut got\b", str(text))]

    assert found_in_modules(but_got) == {}
