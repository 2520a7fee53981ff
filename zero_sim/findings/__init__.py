"""Records of findings and results, and the comparisons that fill them."""
