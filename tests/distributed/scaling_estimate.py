"""From one and two GPUs to many: a step's time on data-parallel GPUs, by a formula that three measurements feed.

    t(n, T) = C(T) / n + F + E(n, T)

C(T), for T tokens a step: what is divided among GPUs; forward and backward, proportional to T. F: what each GPU does
whatever their number; the optimizer, launches that nobody waits for. E: what is seen of the sum of gradients.

    C + F = t(1),  C / 2 + F + E(2) = t(2)        both measured, at the same T
    R(n) = 2 (n - 1) / n * G / W                  a ring all-reduce of G bytes of gradients at W bytes a second
    H = 2/3 C / n / m                             the backward pass of the last of m micro-batches, which hides it
    E = max(R(n) - H, R(n) / buckets)             the last bucket has nothing left to hide behind

W is measured inside a node. Between nodes it is what the node's network cards make of it (NODE).
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS_A_NODE = 8
# Bytes a second between nodes: eight cards of 400 Gbit/s, of which NCCL gets four fifths (assumed)
NODE = 8 * 50e9 * 0.8
# Bytes of a bucket of FP32 gradients: Megatron's 40 million of them, or a million a GPU if that is more
BUCKET, BUCKET_A_GPU = 160e6, 4e6


@dataclass(frozen=True)
class Measured:
    """Seconds a step of `tokens` on one GPU and on two data-parallel ones, of micro-batches of micro_tokens; bytes of
    gradients; bytes a second of a ring all-reduce inside the node."""

    tokens: int
    micro_tokens: int
    one: float
    two: float
    gradients: float
    bandwidth: float

    @property
    def divided(self) -> float:
        """C. E(2) depends on it, by what hides the sum, and so little that taking all of t(1) for it there will do."""
        return max(min(2 * (self.one - self.two + self.exposed(2, self.tokens, self.one)), self.one), 0.0)

    @property
    def fixed(self) -> float:
        """F."""
        return self.one - self.divided

    def exposed(self, gpus: int, tokens: int, divided: float) -> float:
        """E, of a step that divides `divided` seconds among the GPUs."""
        if gpus == 1:
            return 0.0
        bandwidth = self.bandwidth if gpus <= GPUS_A_NODE else min(self.bandwidth, NODE)
        reduce = 2 * (gpus - 1) / gpus * self.gradients / bandwidth
        buckets = max(self.gradients / max(BUCKET, BUCKET_A_GPU * gpus), 1)
        micro_batches = max(tokens / gpus / self.micro_tokens, 1)
        return max(reduce - 2 / 3 * divided / gpus / micro_batches, reduce / buckets)

    def parts(self, gpus: int, tokens: int) -> tuple[float, float, float]:
        """C / n, F and E, of a step of `tokens` on `gpus` data-parallel GPUs."""
        divided = self.divided * tokens / self.tokens
        return divided / gpus, self.fixed, self.exposed(gpus, tokens, divided)

    def seconds(self, gpus: int, tokens: int) -> float:
        """t, their sum."""
        return sum(self.parts(gpus, tokens))

    def speedup(self, gpus: int, tokens: int) -> float:
        """Over one GPU at as many tokens a step."""
        return self.seconds(1, tokens) / self.seconds(gpus, tokens)
