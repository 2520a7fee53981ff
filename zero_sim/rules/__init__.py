"""The search for the rules by which a target computes."""
