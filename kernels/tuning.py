"""Launch parameters: what cannot change a result. Pinned for a GPU model, never tuned at run time.

`rows` is the height of a kernel's tile on the axis that its programs divide. It may span several quantisation blocks
where every scale that the kernel makes is a row's own; otherwise it is the block. Software pipelining (`stages`) holds
several tiles in shared memory at once: where a GPU has too little of it, the pipeline is shorter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from sagebwd.attention.config import BLOCKS, QuantConfig
from sagebwd.kernels.common import padded_dim

LOG2E = math.log2(math.e)
SMALLEST_BLOCK = 32  # what INT8 matrix units contract at a time

# Shared memory that one block may use, bytes, by 10 x major + minor of the compute capability (CUDA programming guide,
# technical specifications; the same in CCCL's arch_traits.h). A GPU that is not listed is taken to have the least.
SMALL = 99 << 10
SHARED_LIMIT = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10}


# Keys that a query has on average from which on Hopper's own kernels are faster than the portable ones (H200), forward
# and backward, by QuantConfig.products.
HOPPER_FROM = {"all": (2048, 1024), "scores": (512, 512)}


class Launch(NamedTuple):
    rows: int
    warps: int
    stages: int


class HopperLaunch(NamedTuple):
    """stages: tiles of K and V in flight. slots: of Q. registers: of a thread that computes."""

    stages: int
    slots: int
    registers: int


class HopperScoresBackwardLaunch(NamedTuple):
    """stages: tiles of queries in flight, 2 or 4. main, third: registers of a thread of the two warpgroups that compute
    dK and dV, and of the one that computes dQ."""

    stages: int
    main: int
    third: int


class KeyLaunch(NamedTuple):
    """A launch of the key kernel: for dK, for dV, or for both."""

    launch: Launch
    dk: bool
    dv: bool


def forward(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    """The forward's P has a scale a row in every config; only Q-smoothing ties its tile to the block."""
    warps = 8 if dp > 128 or config.block_q == 128 else 4
    return _fitting(
        "forward", capability(device), dp, config, Launch(config.block_q, warps, _stages(capability(device)))
    )


def pairs(dp: int, block_k: int, smooth_q: bool) -> bool:
    """Whether the forward takes two key tiles a step, on every GPU alike: it decides the order of two sums. Larger
    tiles, and the mean's logits of Q-smoothing, leave too few registers."""
    return block_k * dp <= 64 * 128 and not smooth_q


def hopper_forward() -> HopperLaunch:
    """192 KiB of shared memory at D = 128, and all registers that two warpgroups can have beside the one that loads."""
    return HopperLaunch(stages=4, slots=2, registers=240)


def hopper_scores_forward() -> HopperLaunch:
    """224 KiB of shared memory at D = 128."""
    return HopperLaunch(stages=4, slots=2, registers=240)


def hopper_scores_backward(dim: int) -> HopperScoresBackwardLaunch:
    """210 KiB of shared memory at D = 128, with FP32 sums of dQ 226, all but 1 of what there is; at D = 64 164 and 172.
    Registers: the 504 that a multiprocessor has for a thread of each of three warpgroups; at D = 128 two of them have
    dP beside their exponentials."""
    if dim == 128:
        return HopperScoresBackwardLaunch(stages=2, main=224, third=56)
    return HopperScoresBackwardLaunch(stages=4, main=216, third=72)


def backward_kv(device: torch.device, dp: int, config: QuantConfig) -> tuple[KeyLaunch, ...]:
    """Wide heads: dK and dV one after the other, since both sums at once spill (H200, D = 128, N = 8192: 3.6 + 1.9 ms
    instead of 8.6). On Hopper dK's kernel is faster in 4 warps with some spills than in 8 with none (4.0 ms)."""
    own, sm, warps = config.block_k, capability(device), _backward_warps(dp, config)
    if dp <= 64:
        return (KeyLaunch(_fitting("backward_kv", sm, dp, config, Launch(own, warps, _stages(sm))), True, True),)
    narrow = 4 if dp <= 128 and max(config.block_q, own) <= 64 else 8
    wide = Launch(own, narrow, 2) if sm == 90 else Launch(own, 8, 2)
    return (
        KeyLaunch(_fitting("backward_k", sm, dp, config, wide), True, False),
        KeyLaunch(_fitting("backward_v", sm, dp, config, Launch(own, narrow, _stages(sm))), False, True),
    )


def backward_q(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    own, sm = config.block_q, capability(device)
    free = config.granularity == "row" and not config.smooth_q
    tall = 128 if free and dp == 128 and SHARED_LIMIT.get(sm, SMALL) >= 227 << 10 else own
    return _fitting("backward_q", sm, dp, config, Launch(tall, _backward_warps(dp, config), _stages(sm)))


def scores_forward(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    """With products="scores" Q's scale is a row's and nothing else has one: tiles may be as high as registers allow."""
    sm = capability(device)
    return _fitting("scores_forward", sm, dp, config, Launch(_scores_rows(dp), 8, _stages(sm)))


def scores_backward_kv(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    sm = capability(device)
    return _fitting("scores_backward_kv", sm, dp, config, Launch(_scores_keys(dp), 8, 2 if dp <= 128 else 1))


def scores_backward_q(device: torch.device, dp: int, config: QuantConfig) -> Launch:
    sm = capability(device)
    return _fitting("scores_backward_q", sm, dp, config, Launch(_scores_queries(sm, dp), 8, 2))


def scores_step(config: QuantConfig) -> int:
    """Queries that dK and dV take at a time, on every GPU alike, as it decides the order of their sums: more would
    leave too few registers."""
    return min(config.block_q, 32)


def _scores_rows(dp: int) -> int:
    return 128 if dp <= 128 else 64


def _scores_keys(dp: int) -> int:
    return 128 if dp <= 64 else 64


def _scores_queries(capability: int, dp: int) -> int:
    return 128 if dp <= 128 and SHARED_LIMIT.get(capability, SMALL) >= 227 << 10 else 64


def _stages(capability: int) -> int:
    """Hopper's matrix units read shared memory by themselves; elsewhere a third tile in flight costs registers."""
    return 3 if capability == 90 else 2


def _backward_warps(dp: int, config: QuantConfig) -> int:
    return 8 if dp > 64 or 128 in (config.block_q, config.block_k) else 4


@cache
def capability(device: torch.device) -> int:
    """10 x major + minor of a GPU. A CPU (the interpreter) is as an H200: it has no limit of its own."""
    if device.type == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, each of which holds one program of a persistent kernel."""
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def refusal(capability: int, dim: int, config: QuantConfig) -> str | None:
    """Why the kernels cannot run `config` at this head dim on such a GPU, with the remedy; None: they can."""
    for name in ("block_q", "block_k"):
        if getattr(config, name) < SMALLEST_BLOCK:
            return f"QuantConfig.{name} is {getattr(config, name)}: on a GPU set it to {SMALLEST_BLOCK} or more"
    dp, limit = padded_dim(dim), SHARED_LIMIT.get(capability, SMALL)
    needed = _least(capability, dp, config)
    if needed <= limit:
        return None
    fits = max(b for b in BLOCKS if _least(capability, dp, replace(config, block_q=b, block_k=b)) <= limit)
    return (
        f"QuantConfig.block_q={config.block_q} and block_k={config.block_k} at head dim {dim} need {needed >> 10} KiB "
        f"of shared memory, and a GPU of compute capability {capability / 10:.1f} has {limit >> 10} KiB a block: "
        f"set both to {fits}"
    )


def _least(capability: int, dp: int, config: QuantConfig) -> int:
    q, k = config.block_q, config.block_k
    tiles = {"forward": (q, k), "backward_k": (q, k), "backward_q": (q, k)}
    if config.products == "scores":
        tiles = {
            "scores_forward": (_scores_rows(dp), k),
            "scores_backward_kv": (scores_step(config), _scores_keys(dp)),
            "scores_backward_q": (_scores_queries(capability, dp), k),
        }
    return max(shared_bytes(name, capability, dp, *tile, config.smooth_q, stages=1) for name, tile in tiles.items())


@cache  # of every launch's host time a tenth otherwise
def _fitting(kernel: str, capability: int, dp: int, config: QuantConfig, wanted: Launch) -> Launch:
    """`wanted`, with as many of its stages as the GPU's shared memory has room for."""
    limit = SHARED_LIMIT.get(capability, SMALL)
    by_key = kernel in ("backward_kv", "backward_k", "backward_v", "scores_backward_kv")
    q = config.block_q if by_key else wanted.rows
    if kernel == "scores_backward_kv":
        q = scores_step(config)
    k = wanted.rows if by_key else config.block_k
    for stages in range(wanted.stages, 0, -1):
        if shared_bytes(kernel, capability, dp, q, k, config.smooth_q, stages) <= limit:
            return wanted._replace(stages=stages)
    raise ValueError(refusal(capability, dp, config) or f"{kernel}: {wanted.rows} rows do not fit sm_{capability}")


def shared_bytes(kernel: str, capability: int, dp: int, q: int, k: int, smooth_q: bool, stages: int) -> int:
    """An upper bound of what a program of `kernel` keeps in shared memory, for a tile of q queries and k keys.

    The operands that stay for the whole loop, and those that stream through it: in a pipeline all of them, as often as
    it holds tiles (one fewer where matrix units take them from registers, but the tile of P or dS twice as well);
    without one, at the widest moment, the 16-bit operand of dP, or in the forward one of K and V; and P and dS where
    they are in 16 bit.
    """
    stay, stream, widest = {
        "forward": (q, (4 if pairs(dp, k, smooth_q) else 2) * k, k),  # Q; K and V
        "backward_kv": (3 * k, 5 * q, 2 * q),  # K, V in 16 bit; Q twice, dO in INT8 and in 16 bit
        "backward_k": (3 * k, 4 * q, 2 * q),  # the same without dO in INT8
        "backward_v": (k, 2 * q, q),  # K; Q, dO in INT8
        "backward_q": (3 * q, 4 * k, 2 * k),  # Q, dO in 16 bit; K twice, V in 16 bit
        "scores_forward": (q, 3 * k, 2 * k),  # Q; K, V in 16 bit
        "scores_backward_kv": (3 * k, 5 * q, 2 * q),  # K, V in 16 bit; Q, and Q and dO in 16 bit
        "scores_backward_q": (3 * q, 5 * k, 2 * k),  # Q, dO in 16 bit; K, and K and V in 16 bit
    }[kernel]
    if stages == 1:
        of_p_and_ds = 4 * q * k if kernel.startswith("scores_backward") else 0
        return (stay + widest) * dp + of_p_and_ds + 1024
    stay += 2 * k * (stages - 1) * smooth_q  # K in 16 bit
    if 90 <= capability < 100:
        return (stay + stages * stream) * dp + 4096
    return (stay + (stages - 1) * stream) * dp + 2 * q * k + 4096
