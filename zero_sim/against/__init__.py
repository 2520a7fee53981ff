"""Judging a script by another run of itself, such as one on one rank in float64."""
