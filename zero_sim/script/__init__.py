"""Unmodified training scripts, run on simulated ranks instead of by torchrun.

This package imports nothing, so that `zero_sim.checkpoint_here` costs a script nothing.
"""
