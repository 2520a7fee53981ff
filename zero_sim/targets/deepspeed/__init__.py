"""DeepSpeed's ZeRO engine as targets, a stage each; `pip install "zero-sim[deepspeed]"`."""
