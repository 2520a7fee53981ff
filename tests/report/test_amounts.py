"""Amounts of bytes in words."""

import pytest

from zero_sim.report.amounts import aligned, binary_bytes, decimal_bytes, fitted, in_unit, unit_for


@pytest.mark.parametrize(
    ("amount", "decimal", "binary"),
    [
        (38_500_000_000, "38.50 GB", "35.86 GiB"),
        (670_000_000, "670.00 MB", "638.96 MiB"),
        (9_999_000, "9,999.00 kB", "9,764.65 KiB"),
        (9_999, "9,999 B", "9,999 B"),
        (0, "0 B", "0 B"),
    ],
)
def test_bytes_have_decimal_and_binary_units(amount, decimal, binary):
    assert (decimal_bytes(amount), binary_bytes(amount)) == (decimal, binary)


def test_small_amount_in_a_column_of_large_ones_has_its_own_unit():
    unit = unit_for([2 * 10**9, 4_000_000, 0])
    cells = [in_unit(each, unit) for each in (2 * 10**9, 4_000_000, 0)]
    assert (unit[0], cells) == ("GB", ["2.00", "4,000.00 kB", "0.00"])


TABLE = [["model", "stage", "total GB"], ["7b", "0", "112.00"], ["7b", "3", "14.00"]]


def test_table_that_fits_is_not_transposed():
    assert fitted(TABLE, columns=80) == aligned(TABLE)


def test_table_that_is_too_wide_is_transposed():
    assert fitted(TABLE, columns=20).splitlines() == [
        "model: 7b",
        "stage          0      3",
        "total GB  112.00  14.00",
    ]


def test_transposed_table_keeps_model_names():
    table = [TABLE[0], TABLE[1], ["8b", *TABLE[2][1:]]]
    assert fitted(table, columns=20).splitlines()[0] == "model         7b     8b"
