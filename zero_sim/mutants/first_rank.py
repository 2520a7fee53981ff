"""Faults of sums that the first rank adds, and sends back."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.collectives import _SumAtFirst


@mutant("X01", "SCALE", "DR", seen_in="class SCALE", core=True)
def first_counts_itself_twice(patch: Patches) -> None:
    """The first rank adds what others sent to its own gradient, and its own once more."""
    patch[_SumAtFirst._add, "in parts[1:]"] = "in [*parts[1:], parts[0]]"


@mutant("X02", "ORDER", "DR", seen_in="class ORDER")
def added_from_the_last(patch: Patches) -> None:
    """The first rank adds from the last rank to itself."""
    patch[_SumAtFirst._add, "self.flat.copy_("] = "parts = parts[::-1]\n..."


@mutant("X03", "VOLUME", "DR", seen_in="class VOLUME", kill="volume")
def kept_by_the_first(patch: Patches) -> None:
    """The first rank adds and keeps the sum: all others go on with their own gradient."""
    patch[_SumAtFirst.wait, "self._send_back()"] = "pass"


@mutant("X04", "ASYNC", "AS DR", seen_in="class ASYNC", kill="race")
def added_before_it_came(patch: Patches) -> None:
    """The first rank adds what others send before it has waited for it."""
    patch[_SumAtFirst.wait, "self.sent.wait()"] = "pass"
    patch[_SumAtFirst.wait, "self._send_back()"] = "self.sent.wait()\n..."


@mutant("X05", "DTYPE", "DR", seen_in="class DTYPE")
def added_in_fp32(patch: Patches) -> None:
    """The first rank adds 16-bit gradients in fp32, in which no other reduction here does."""
    patch[_SumAtFirst._add, "self.flat.copy_(parts[0])"] = "total = parts[0].float()"
    patch[_SumAtFirst._add, "self.flat.add_(part)"] = """
        total = total + part
        self.flat.copy_(total)"""
