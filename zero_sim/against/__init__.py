"""Judgement of a script by another run of itself, for example on one rank in float64."""
