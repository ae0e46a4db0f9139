"""The operator: `sage_attention` and its `QuantConfig`."""

from typing import TYPE_CHECKING

from sagebwd.attention.config import QuantConfig

if TYPE_CHECKING:
    from sagebwd.attention.function import sage_attention

__all__ = ["QuantConfig", "sage_attention"]


def __getattr__(name: str) -> object:
    """The operator brings torch along, seconds of import that reading a recipe need not wait for."""
    if name == "sage_attention":
        from sagebwd.attention.function import sage_attention

        return sage_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
