"""Recipes, and the training program that runs one arm of a recipe."""

import sagebwd.megatron  # noqa: F401 (quietens Megatron-core's expected warnings before any module here imports it)
