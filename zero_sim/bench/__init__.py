"""Benchmarks: zero_sim's own cost, compared with goals, other libraries and earlier runs."""

from zero_sim.bench.history import append_history, find_worse, read_history
from zero_sim.bench.rows import run_benchmarks

__all__ = ["append_history", "find_worse", "read_history", "run_benchmarks"]
