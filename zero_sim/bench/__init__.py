"""The benchmark: what zero_sim costs, beside what it should, beside its peers and what it was."""

from zero_sim.bench.history import append_history, find_worse, read_history
from zero_sim.bench.rows import run_benchmarks

__all__ = ["append_history", "find_worse", "read_history", "run_benchmarks"]
