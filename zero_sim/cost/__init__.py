"""Costs of ZeRO in closed form, and what a run did beside them: bytes moved, held and in flight."""
