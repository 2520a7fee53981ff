"""Search for a target's arithmetic rules, and explanation of differences by other rules."""
