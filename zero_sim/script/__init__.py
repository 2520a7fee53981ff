"""Unmodified training scripts, run as ranks of a simulated world instead of by torchrun.

Nothing is imported here, so that `zero_sim.checkpoint_here` costs a script nothing.
"""
