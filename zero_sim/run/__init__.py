"""Scenario and target in, verdict out: the comparison, invariants, the first divergence."""

from zero_sim.findings.records import CaseResult, Finding, Verdict

__all__ = ["CaseResult", "Finding", "Verdict"]
