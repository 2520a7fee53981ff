"""Variants of textbook parts. Each plugs into a seam; the textbook imports none of them."""
