"""The error of every tensor of SageBwd's forward and backward against causal attention in FP64.

SageBwd is `sagebwd.attention.reference`, with the inputs' own dtype for O and FP32 for the rest. Memory grows with the
length, not with its square: both are worked out one strip of keys at a time. Runs on the inputs' device.

Shapes as in `reference`: B batch, K key/value heads, G query heads a key/value head, N queries and as many keys.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.attention import reference
from sagebwd.attention.config import BLOCKS, QuantConfig

INNER = ("delta", "P", "P rounded", "dP", "dS", "dS rounded")
OUTPUTS = ("O", "dQ", "dK", "dV")
TENSORS = (*INNER, *OUTPUTS)
"""P and dS before and after their own rounding: before it, they carry the errors of S, of delta and of lse alone. P is
rounded as dV's left operand, dS as dQ's. P, dP and dS are taken where a query sees a key."""

STRIP = 256  # keys at a time in the FP64 passes
ELEMENTS = 2**24  # of a [K, G, N, keys] tensor: how many heads are worked on at once


class Error(NamedTuple):
    rel_l2: float  # ||x' - x|| / ||x||
    cos_sim: float  # cosine of the flattened tensors
    rms: float  # of the truth, sqrt(mean(x^2))


def mean(errors: Sequence[Error]) -> Error:
    """Number by number."""
    return Error(*(sum(numbers) / len(errors) for numbers in zip(*errors, strict=True)))


class Tally:
    """Sums over many calls, so that an error is that of all the tensors flattened into one. Kept on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, ours: Tensor, true: Tensor, elements: int | None = None) -> None:
        """elements: how many of the tensor's count, where not all do; the others are 0 in both."""
        ours = ours.double()
        sums = [(ours - true).square().sum(), true.square().sum(), ours.square().sum(), (ours * true).sum()]
        sums.append(torch.full_like(sums[0], true.numel() if elements is None else elements))
        self._sums[name] = self._sums.get(name, 0) + torch.stack(sums)

    def errors(self) -> dict[str, Error]:
        """By the names of TENSORS. NaN where the truth is all zero."""
        found = {}
        for name in TENSORS:
            wrong, true, ours, both, elements = self._sums[name].tolist()
            cosine = both / math.sqrt(true * ours) if true * ours else math.nan
            found[name] = Error(math.sqrt(wrong / true) if true else math.nan, cosine, math.sqrt(true / elements))
        return found


def measure(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor,
    *, softmax_scale: float, tallies: Mapping[QuantConfig, Tally],
) -> None:  # fmt: skip
    """Add the errors of each config to its tally. q, do [B, H, N, D]; k, v [B, K, N, D], any floating dtype."""
    groups = q.shape[1] // k.shape[1]
    at_once = max(1, ELEMENTS // (q.shape[0] * groups * q.shape[2] * max(STRIP, *BLOCKS)))
    with _no_tf32():
        for first in range(0, k.shape[1], at_once):
            of_k = slice(first, first + at_once)
            of_q = slice(first * groups, (first + at_once) * groups)
            heads = q[:, of_q], k[:, of_k], v[:, of_k], do[:, of_q]
            truth = _Truth(*heads, softmax_scale)
            for config, tally in tallies.items():
                _measure(*heads, softmax_scale, config, truth, tally)


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    """FP32 products in FP32: some containers of PyTorch allow TF32 by an environment variable."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _measure(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor,
    softmax_scale: float, config: QuantConfig, truth: _Truth, tally: Tally,
) -> None:  # fmt: skip
    args = {"causal": True, "softmax_scale": softmax_scale, "config": config}
    o, saved = reference.forward(q, k, v, **args)
    observer = _Comparison(truth, tally)
    grads = reference.backward(do, v, o, saved, n=k.shape[-2], observer=observer, **args)
    for name, ours, true in zip(OUTPUTS, (o, *grads), truth.outputs(), strict=True):
        tally.add(name, ours, true)


class _Truth:
    """Causal attention and its gradients in FP64."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, softmax_scale: float) -> None:
        self.q, self.do = (x.double().unflatten(1, (k.shape[1], -1)) for x in (q, do))  # [B, K, G, N, D]
        self.k, self.v = (x.double()[:, :, None] for x in (k, v))  # [B, K, 1, N, D]
        self.scale = softmax_scale
        self.length = q.shape[-2]
        self.lse = self.q.new_full(self.q.shape[:-1], -math.inf)  # [B, K, G, N]
        self.o, self.dq = torch.zeros_like(self.q), torch.zeros_like(self.q)
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        strips = [slice(at, min(at + STRIP, self.length)) for at in range(0, self.length, STRIP)]
        strips = [(slice(cols.start, self.length), cols) for cols in strips]  # earlier queries see none of its keys
        for rows, cols in strips:
            self.lse[..., rows] = torch.logaddexp(self.lse[..., rows], self._scores(rows, cols).logsumexp(-1))
        for rows, cols in strips:
            self.o[..., rows, :] += self._p(rows, cols) @ self.v[..., cols, :]
        self.delta = (self.do * self.o).sum(-1)
        for rows, cols in strips:
            p, _, ds = self.tile(rows, cols)
            self.dv[..., cols, :] = (p.mT @ self.do[..., rows, :]).sum(2, keepdim=True)
            self.dk[..., cols, :] = (ds.mT @ self.q[..., rows, :]).sum(2, keepdim=True) * self.scale
            self.dq[..., rows, :] += ds @ self.k[..., cols, :] * self.scale

    def tile(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor, Tensor]:
        """P, dP and dS there, [B, K, G, rows, cols]."""
        p = self._p(rows, cols)
        dp = self.do[..., rows, :] @ self.v[..., cols, :].mT
        return p, dp, p * (dp - self.delta[..., rows, None])

    def outputs(self) -> tuple[Tensor, ...]:
        """O, dQ [B, H, N, D], dK, dV [B, K, N, D]."""
        return self.o.flatten(1, 2), self.dq.flatten(1, 2), self.dk.squeeze(2), self.dv.squeeze(2)

    def seen(self, rows: slice, cols: slice) -> Tensor:
        """Which of the keys each query sees, [rows, cols]."""
        row, col = (torch.arange(x.start, x.stop, device=self.q.device) for x in (rows, cols))
        return col <= row[:, None]

    def _scores(self, rows: slice, cols: slice) -> Tensor:
        s = self.q[..., rows, :] @ self.k[..., cols, :].mT * self.scale
        return s.masked_fill(~self.seen(rows, cols), -math.inf)

    def _p(self, rows: slice, cols: slice) -> Tensor:
        return torch.exp(self._scores(rows, cols) - self.lse[..., rows, None])


class _Comparison:
    """A reference.Observer that adds the error of what it is told to a tally."""

    def __init__(self, truth: _Truth, tally: Tally) -> None:
        self.truth, self.tally = truth, tally

    def delta(self, delta: Tensor) -> None:
        self.tally.add("delta", delta[..., : self.truth.length], self.truth.delta)

    def tile(
        self, rows: slice, cols: slice, *, p: Tensor, dp: Tensor, ds: Tensor, p_rounded: Tensor, ds_rounded: Tensor
    ) -> None:
        rows, cols = (slice(x.start, min(x.stop, self.truth.length)) for x in (rows, cols))  # without the padding
        true_p, true_dp, true_ds = self.truth.tile(rows, cols)
        seen = self.truth.seen(rows, cols)
        elements = math.prod(true_p.shape[:-2]) * _seen_of(rows, cols)
        pairs = {
            "P": (p, true_p),
            "P rounded": (p_rounded, true_p),
            "dP": (dp, true_dp * seen),
            "dS": (ds, true_ds),
            "dS rounded": (ds_rounded, true_ds),
        }
        for name, (ours, true) in pairs.items():
            ours = ours[..., : true.shape[-2], : true.shape[-1]]
            self.tally.add(name, ours * seen if name == "dP" else ours, true, elements)


def _seen_of(rows: slice, cols: slice) -> int:
    """How many pairs of a query in `rows` and a key in `cols` the causal mask leaves."""
    width = cols.stop - cols.start

    def before(row: int) -> int:
        seeing = max(row - cols.start, 0)  # the first of these sees one key, the next two, until one sees all
        rising = min(seeing, width)
        return rising * (rising + 1) // 2 + (seeing - rising) * width

    return before(rows.stop) - before(rows.start)
