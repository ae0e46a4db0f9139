"""The operator: `sage_attention`, `sage_attention_packed` and their `QuantConfig`."""

from typing import TYPE_CHECKING

from sagebwd.attention.config import QuantConfig

if TYPE_CHECKING:
    from sagebwd.attention.function import sage_attention, sage_attention_packed

__all__ = ["QuantConfig", "sage_attention", "sage_attention_packed"]


def __getattr__(name: str) -> object:
    """The operator brings torch along, seconds of import that reading a recipe need not wait for."""
    if name in ("sage_attention", "sage_attention_packed"):
        from sagebwd.attention import function

        return getattr(function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
