"""Rank programs on real processes: gloo and NCCL, worker teams, and the probe of their orders."""
