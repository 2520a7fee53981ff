"""Preloaded by workers that are to have the stand-in for NCCL."""

import standin_nccl

standin_nccl.install()
