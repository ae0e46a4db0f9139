"""DeepSpeed's configuration for each ZeRO stage (parallel.zero): what decides about speed and memory, to be edited.

What is trained (batches, precision, clipping, offload) is the recipe's, and filled in: see engine.deepspeed_config.
"""
