"""Seeded faults in our own system, and the harness's score at finding them."""

from zero_sim.mutants.catalogue import IMPOSSIBLE, MUTANTS, find_mutants
from zero_sim.mutants.records import HuntResult, Mutant

__all__ = ["IMPOSSIBLE", "MUTANTS", "HuntResult", "Mutant", "find_mutants"]
