"""The world: rank threads, the baton between them, and what each rank has for itself."""
