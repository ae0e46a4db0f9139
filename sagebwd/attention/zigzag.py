"""Long sequences over several ranks: which tokens a rank holds, and how all ranks' tokens come together.

A sequence is cut into 2 size chunks, and rank r holds chunks r and 2 size - 1 - r, one after the other: with a causal
mask every rank then has the same number of pairs of a query and a key that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # torch < 2.13
ALIGNMENT = 16  # bytes at which each tensor begins in a message


@dataclass(frozen=True)
class Zigzag:
    """A rank's place among `size` ranks; `group` is the process group that they exchange in."""

    rank: int
    size: int
    group: distributed.ProcessGroup | None = None

    @staticmethod
    def of(group: distributed.ProcessGroup) -> Zigzag:
        return Zigzag(group.rank(), group.size(), group)

    @property
    def chunks(self) -> tuple[int, int]:
        """The two that this rank holds."""
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of x, whose dimension `dim` counts all tokens: a copy."""
        parts = x.chunk(2 * self.size, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)

    def start(self, *parts: tuple[Tensor, int]) -> Callable[[], list[Tensor]]:
        """Begin to gather tensors from all ranks, in one message. A part: a tensor of this rank's tokens (or of blocks
        of them), and the dimension that counts these.

        The result, when called, waits (on a GPU the stream does, not the host) and returns each tensor with all tokens
        in order, contiguous. Bytes are copied, never converted.
        """
        # [2, ...]: one entry a chunk
        mine = [x.detach().unflatten(dim, (2, -1)).movedim(dim, 0) for x, dim in parts]
        ends = [0]
        for x in mine:
            ends.append(ends[-1] + -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT)
        message = torch.empty(ends[-1], dtype=torch.uint8, device=mine[0].device)
        for x, start in zip(mine, ends[:-1], strict=True):
            _view(message[None], start, x)[0].copy_(x)
        arrived = message.new_empty(self.size, ends[-1])
        work = _all_gather(arrived.flatten(), message, group=self.group, async_op=True)

        def wait() -> list[Tensor]:
            work.wait()
            places = zip(mine, ends[:-1], parts, strict=True)
            return [self._in_order(_view(arrived, start, x), dim) for x, start, (_, dim) in places]

        return wait

    def gather(self, *parts: tuple[Tensor, int]) -> list[Tensor]:
        """`start`, and wait."""
        return self.start(*parts)()

    def add(self, *parts: tuple[Tensor, int]) -> list[Tensor]:
        """The opposite way: of each tensor of all tokens, which every rank has another of, the sum over the ranks for
        this rank's tokens, in FP32. They travel in the dtype they have, and are added in the order of the ranks."""
        results = []
        for x, dim in parts:
            chunks = x.unflatten(dim, (2 * self.size, -1)).movedim(dim, 0)
            order = [chunk for rank in range(self.size) for chunk in Zigzag(rank, self.size).chunks]
            sent = chunks[order].contiguous()
            arrived = torch.empty_like(sent)
            distributed.all_to_all_single(arrived.flatten(), sent.flatten(), group=self.group)
            mine = arrived.unflatten(0, (self.size, 2)).sum(0, dtype=torch.float32)
            results.append(mine.movedim(0, dim).flatten(dim, dim + 1))
        return results

    def _in_order(self, arrived: Tensor, dim: int) -> Tensor:
        """[size, 2, ...] as the ranks sent them, `dim` counting a chunk's tokens in the rest: all tokens in order."""
        shape = list(arrived.shape[2:])
        length = shape[dim]
        shape[dim] *= 2 * self.size
        whole = arrived.new_empty(shape)
        chunks = whole.unflatten(dim, (2 * self.size, length)).movedim(dim, 0)
        for rank in range(self.size):
            for half, chunk in enumerate(Zigzag(rank, self.size).chunks):
                chunks[chunk].copy_(arrived[rank, half])
        return whole


def _view(messages: Tensor, start: int, like: Tensor) -> Tensor:
    """[messages, *like.shape] of the bytes from `start` on of messages [messages, bytes]."""
    size = like.numel() * like.element_size()
    return messages[:, start : start + size].view(like.dtype).unflatten(1, like.shape)


def check_chunks(tokens: int, size: int, multiple: int) -> None:
    """Raises ValueError: `tokens` of a sequence do not make 2 size chunks of a multiple of `multiple` tokens."""
    unit = 2 * size * multiple
    if tokens % unit:
        fit = " or ".join(str(n) for n in (tokens // unit * unit, math.ceil(tokens / unit) * unit) if n)
        raise ValueError(
            f"{tokens} tokens over {size} context-parallel ranks are no {2 * size} chunks of whole {multiple}s: "
            f"make the context a multiple of {unit}, such as {fit}"
        )
