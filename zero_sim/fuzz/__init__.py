"""Fuzzing: drawn cases that lean towards the edges of a partition, and campaigns over them."""
