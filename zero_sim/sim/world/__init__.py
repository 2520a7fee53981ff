"""The world: rank threads, the baton between them, and the state that each rank has for itself."""
