"""Findings as records: what differs, how and where, and the result of a case."""
