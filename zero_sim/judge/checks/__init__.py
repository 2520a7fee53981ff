"""Checks: one idea per module, run by the judge in the order of `zero_sim.judge.checks.table`."""
