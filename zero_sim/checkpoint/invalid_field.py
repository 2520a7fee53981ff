"""The error for a field of a manifest whose value should not be there."""

from __future__ import annotations


class InvalidField(Exception):
    """A value of a manifest is not what it should be.

    Args:
        path: The field, such as `content.params[3].shape`.
        expected: What it should be, after "to be".
        got: What it is.
    """

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}")
        self.path = path
        self.expected = expected
        self.got = got
