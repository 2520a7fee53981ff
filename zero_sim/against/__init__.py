"""A script judged by another way to run it, such as on one rank, in float64."""
