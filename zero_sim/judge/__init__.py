"""The judge: everything a rank holds against the reference, and the verdict."""
