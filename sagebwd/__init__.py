"""SageBwd: a trainable INT8 attention (arXiv 2603.02170), and the recipes that compare it with full precision."""

__version__ = "0.1.0"
