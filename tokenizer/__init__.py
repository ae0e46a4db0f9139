"""From text to Megatron's token files: corpora, the SentencePiece tokenizer, the split, the encoding."""

from sagebwd.tokenizer.pipeline import prepare
from sagebwd.tokenizer.prepared import Prepared, load_prepared

__all__ = ["Prepared", "load_prepared", "prepare"]
