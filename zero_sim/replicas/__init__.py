"""Replicated tensors and data rows of a script's ranks, compared in each run."""
