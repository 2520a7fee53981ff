"""Costs of ZeRO in closed form, and observers that measure them: traffic, memory, overlap."""
