"""The judge: compares all state of every rank with the reference, and reaches the verdict."""
