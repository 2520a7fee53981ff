"""Replicated tensors and rows read by the ranks of a script, compared in each of its runs."""
