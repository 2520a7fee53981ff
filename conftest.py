"""Tiers of both suites, `tests` and `property_tests`."""

from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]
