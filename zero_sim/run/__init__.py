"""Scenario and target in, verdict out: the comparison, invariants, the first divergence."""

from zero_sim.findings.records import CaseResult, Finding, Verdict
from zero_sim.run.runner import run_case

__all__ = ["CaseResult", "Finding", "Verdict", "run_case"]
