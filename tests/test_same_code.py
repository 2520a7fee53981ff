import pytest

from tests.same_code import code_of


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""Says what."""\nx = 1', "x = 1  # one"),
        ('class A:\n    a: int\n    "What a is."', 'class A:\n    a: int\n    "Number of ranks."'),
        ('raise E(f"expected {a} of {b}")', 'raise E(f"{b} has no {a}")'),
        ('raise E("expected a file")', 'raise E("no such file")'),
    ],
)
def test_changed_text_is_ignored(before, after):
    assert code_of(before) == code_of(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = 1", "x = 2"),
        ('kind = "mean"', 'kind = "sum"'),
        ('raise E(f"expected {a} here")', 'raise E(f"expected {b} here")'),
        ('raise E("expected a file")', 'raise Other("expected a file")'),
    ],
)
def test_changed_code_is_found(before, after):
    assert code_of(before) != code_of(after)
