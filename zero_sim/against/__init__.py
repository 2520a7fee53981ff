"""Judgement of a script by another run of itself, for example on one rank in float64.

A side is one configuration of the script, such as 4 ranks. The expected side runs first, and again
with rounding noise. The judged side may then be dealt the rows of the expected side. Tensors
are observed at points: a step, a moment in it and a name. A tensor differs if its distance from the
expected tensor is a large multiple of its rounding. An account explains the first difference.
"""
