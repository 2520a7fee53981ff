"""Module that workers preload to use the stand-in for NCCL."""

import standin_nccl

standin_nccl.install()
