"""Uninitialized params of PyTorch's FSDP2 example.

Run: python examples-fsdp2-unfilled.py FOLDER_OF_FSDP2_EXAMPLE

The example itself runs under torchrun, but its initialization needs only one process.
"""

import sys

import torch

sys.path.insert(0, sys.argv[1])

from model import ModelArgs, Transformer

with torch.device("meta"):
    model = Transformer(
        ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64, dropout_p=0)
    )
model.to_empty(device="cpu")
with torch.no_grad():
    for param in model.parameters():
        param.fill_(float("nan"))
model.reset_parameters()
left = [name for name, param in model.named_parameters() if param.isnan().any()]
total = len(list(model.parameters()))
print(f"expected all params reset, got {len(left)} of {total} not reset, such as {left[0]}")
