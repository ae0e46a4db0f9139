"""The kernels against the reference on the machine at hand, in seconds: `python -m sagebwd.selftest`.

On a GPU the kernels run there; without one, in Triton's interpreter, which TRITON_INTERPRET=1 must ask for before
Triton is imported: so `sagebwd doctor` runs this module in a process of its own. One JSON object a case; exit code 1
where one fails.
"""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.attention import QuantConfig, reference, sage_attention
from sagebwd.kernels.hopper import switched

LIMIT = 5e-3  # Rel-L2 of kernels to reference: they differ by the order of sums, and quantisation itself errs by 2e-2
NAMES = ("o", "dq", "dk", "dv")


class Case(NamedTuple):
    dtype: torch.dtype
    dim: int
    causal: bool
    group: int  # query heads a key/value head
    config: QuantConfig
    hopper: bool = False  # Hopper's kernels wherever they can, at any length; else the portable ones

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"head dim {self.dim}", "causal" if self.causal else "full"]
        parts += [f"GQA {self.group}"] * (self.group > 1)
        if self.config.products == "scores":
            parts += ["only Q K^T in INT8"]
        else:
            parts += [f"P and dS per {self.config.granularity}", f"delta {self.config.delta}"]
        parts += ["Hopper's kernels"] * self.hopper
        return ", ".join(parts)


ROW, TILE = QuantConfig(), QuantConfig(granularity="tile", delta="matched")
SCORES = QuantConfig(products="scores")
ON_GPU = [
    Case(torch.bfloat16, 128, True, 1, ROW),
    Case(torch.bfloat16, 64, False, 4, ROW),
    Case(torch.float16, 72, True, 2, TILE),
    Case(torch.bfloat16, 128, True, 2, SCORES),
]
ON_HOPPER = [case._replace(hopper=True) for case in (*ON_GPU[:2], ON_GPU[3])]
INTERPRETED = [
    Case(torch.float16, 64, True, 2, ROW),
    Case(torch.float32, 40, False, 1, TILE),
    Case(torch.float16, 64, True, 1, SCORES),
]


def cases() -> list[Case]:
    """All kernels that this machine may run."""
    if not torch.cuda.is_available():
        return INTERPRETED
    return ON_GPU + (ON_HOPPER if torch.cuda.get_device_capability() == (9, 0) else [])


def errors(case: Case, device: str, tokens: int) -> dict[str, float]:
    """Rel-L2 of the kernels' o, dq, dk, dv to the reference's."""

    def new(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens, case.dim, device=device).to(case.dtype)

    torch.manual_seed(0)
    q, k, v, do = new(case.group), new(1), new(1), new(case.group)
    args = {"causal": case.causal, "softmax_scale": case.dim**-0.5, "config": case.config}
    o, saved = reference.forward(q, k, v, **args)
    expected = (o, *(grad.to(case.dtype) for grad in reference.backward(do, v, o, saved, n=tokens, **args)))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with switched("1" if case.hopper else "0"):
        o = sage_attention(q, k, v, **args)
        actual = (o.detach(), *torch.autograd.grad(o, (q, k, v), do))
    pairs = zip(NAMES, actual, expected, strict=True)
    return {name: ((a.double() - e.double()).norm() / e.double().norm()).item() for name, a, e in pairs}


def main() -> int:
    gpu = torch.cuda.is_available()
    passed = True
    for case in cases():
        found = errors(case, "cuda" if gpu else "cpu", 1000 if gpu else 100)
        good = all(error <= LIMIT for error in found.values())
        passed &= good
        print(json.dumps({"case": str(case), "passed": good, "errors": found}), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
