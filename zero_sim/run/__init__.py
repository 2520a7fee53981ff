"""Running of one case: scenario and target in, verdict with findings out."""

from zero_sim.findings.records import CaseResult, Finding, Verdict

__all__ = ["CaseResult", "Finding", "Verdict"]
