"""The world: rank threads, the baton, and process state that each rank has for itself."""
