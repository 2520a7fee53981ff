"""Variants of the textbook: each plugs into one of its seams, and none of it imports them."""
