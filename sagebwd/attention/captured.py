"""A file of attention tensors captured from a model: q, k, v and dO of every layer and document, as safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sagebwd.errors import UserError

FORMAT = "sagebwd-captured-1"
KINDS = ("q", "k", "v", "do")

Document = tuple[Tensor, Tensor, Tensor, Tensor]
"""q [1, H, N, D], k and v [1, K, N, D], do [1, H, N, D] of one layer: causal attention over N tokens."""


def _key(layer: int, document: int, kind: str) -> str:
    return f"layer{layer:03d}.document{document:06d}.{kind}"


def write(path: Path, layers: list[list[Document]], *, softmax_scale: float, description: str) -> None:
    """layers: of each layer the same documents in the same order, in the model's dtype. description: what it is of."""
    tensors = {
        _key(layer, number, kind): tensor[0].contiguous()
        for layer, documents in enumerate(layers)
        for number, document in enumerate(documents)
        for kind, tensor in zip(KINDS, document, strict=True)
    }
    about = {"layers": len(layers), "documents": len(layers[0]), "softmax_scale": softmax_scale}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    save_file(tensors, beside, {"format": FORMAT, "about": json.dumps(about), "description": description})
    beside.replace(path)


class Reader:
    """What `write` wrote. Raises UserError for a file that is not such a one."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, "pt")
        except FileNotFoundError:
            raise UserError(f"no file {path}: `sagebwd probe RUN --save {path}` writes one") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is no readable safetensors file ({error}): write it again") from None
        metadata: Mapping[str, str] = self._file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UserError(
                f"{path} holds no captured attention tensors: `sagebwd probe RUN --save {path}` writes them"
            )
        about: dict[str, Any] = json.loads(metadata["about"])
        self.layers: int = about["layers"]
        self.softmax_scale: float = about["softmax_scale"]
        self.description = metadata["description"]
        self._documents: int = about["documents"]

    def documents(self, layer: int, device: torch.device) -> Iterator[Document]:
        for number in range(self._documents):
            yield tuple(self._file.get_tensor(_key(layer, number, kind))[None].to(device) for kind in KINDS)
