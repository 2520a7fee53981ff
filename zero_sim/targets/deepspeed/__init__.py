"""DeepSpeed's ZeRO engine, with a target for each stage; `pip install "zero-sim[deepspeed]"`."""
