"""Untrusted JSON: it becomes records, or one error that names the place."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from zero_sim.untrusted_json import InvalidField, build_record, matching, parse, unfit


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """The inner record."""

    sizes: tuple[int, ...]
    word: Annotated[str, matching("[a-z]*", "small letters")] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """The outer record."""

    leaves: tuple[Leaf, ...]
    rest: Any = None


def read(text):
    return build_record(Tree, parse(text.encode(), where="f"), where="f")


def test_valid_json_becomes_records():
    tree = read('{"leaves": [{"sizes": [1, -9223372036854775808]}], "rest": {"a": [0.1]}}')
    assert tree == Tree(leaves=(Leaf(sizes=(1, -(2**63))),), rest={"a": [0.1]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "f: expected JSON, got an error: Expecting"),
        ("[" * 5000, "f: expected JSON, got an error"),
        ("[" * 40 + "]" * 40, "f: expected JSON, got more than 32 levels"),
        ('{"a": NaN}', "f: expected JSON, got an error: NaN, which JSON does not have"),
        ('{"a": 1, "a": 2}', "f: expected JSON, got an error: a name twice among 'a, a'"),
        (json.dumps({str(i): 0 for i in range(10_001)}), "10001 names in one object"),
        ('{"leaves": [], "rest": [0, 9223372036854775808]}', "f.rest[1]: expected an integer of"),
        ("9" * 5000, "f: expected JSON, got an error"),
        ("{}", "f.leaves: expected a value, got none"),
        ("[]", "f: expected an object, got a list of 0 values"),
        ('{"leaves": [{"sizes": []}], "more": 1}', "f.more: expected no field of this name"),
        ('{"leaves": [{"sizes": [], "x": 1}]}', "f.leaves[0].x: expected no field of this name"),
        ('{"leaves": [{"sizes": [true]}]}', "f.leaves[0].sizes[0]: expected a valid integer, got"),
        ('{"leaves": [{"sizes": [1.0]}]}', "f.leaves[0].sizes[0]: expected a valid integer, got"),
        ('{"leaves": [{"sizes": {}}]}', "f.leaves[0].sizes: expected a valid array, got an object"),
        ('{"leaves": [{"sizes": [], "word": "A"}]}', "word: expected small letters, got 'A'"),
        ('{"leaves": [{"sizes": [], "word": "\\ud800"}]}', "word: expected small letters, got '?'"),
        ('{"leaves": [], "\\u001b": 1}', "f.\\x1b: expected no field of this name"),
    ],
)  # fmt: skip
def test_invalid_json_error_names_its_place(text, said):
    with pytest.raises(InvalidField) as caught:
        read(text)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_long_value_is_clipped_in_the_error():
    with pytest.raises(InvalidField) as caught:
        read(json.dumps({"leaves": "x" * 100_000}))
    assert len(str(caught.value)) < 200


def test_only_the_first_error_is_reported():
    """A million errors would take minutes and gigabytes."""
    started = time.process_time()
    with pytest.raises(InvalidField, match=r"sizes\[0\]"):
        read(json.dumps({"leaves": [{"sizes": [""] * 300_000}]}))
    assert time.process_time() - started < 2


def test_error_text_may_contain_braces():
    assert str(unfit("{braces}")) == "{braces}"
