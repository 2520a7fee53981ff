"""Running of a case: scenario and target in, verdict and findings out."""

from zero_sim.findings.records import CaseResult, Finding, Verdict

__all__ = ["CaseResult", "Finding", "Verdict"]
