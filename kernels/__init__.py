"""Portable Triton kernels of SageBwd (sm_80 and newer). `sagebwd.attention.reference` specifies their numerics."""
