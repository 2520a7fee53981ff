"""Search for a target's rules of arithmetic, and explanations of differences by other rules."""
