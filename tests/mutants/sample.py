"""Functions for tests of changed code."""

from functools import cache


def last_of(count):
    """Index of the last of so many."""
    return count - 1


@cache
def remembered(count):
    """The same, kept."""
    return last_of(count)


class Sized:
    """Has a size."""

    def __init__(self, size):
        self.size = size

    @property
    def doubled(self):
        """Twice the size."""
        return 2 * self.size

    @staticmethod
    def half(size):
        """Half of it."""
        return size // 2
