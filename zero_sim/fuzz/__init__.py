"""Fuzzing: generated cases near the edges of partitions, and campaigns that judge them."""
