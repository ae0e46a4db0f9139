"""What the tests start on several ranks: attention over two or all of them against one, into a JSON file.

No part of the training program, nor Megatron, is imported. Argument: the file. Without a GPU, TRITON_INTERPRET has to
be 1: Triton reads it when it is imported; each case says whether the interpreter is to compute it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.attention import QuantConfig, context, sage_attention
from sagebwd.attention.checks import backend_for
from sagebwd.attention.context import sage_attention_context
from sagebwd.attention.zigzag import Zigzag
from sagebwd.megatron.context_sdpa import CPU, GPU, context_sdpa
from tests.distributed.context_cases import CASES, GPU_CASES, Case

ROOT = 0
ON_GPU = torch.cuda.is_available()


def main(file: Path) -> None:
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    distributed.init_process_group("nccl" if ON_GPU else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = {size: distributed.group.WORLD}
    pairs = [distributed.new_group([first, first + 1]) for first in range(0, size, 2)]
    groups[2] = pairs[rank // 2]
    found = {}
    for name, case in (GPU_CASES if ON_GPU else CASES).items():
        for ranks in case.ranks:
            if ranks == size or rank < 2:
                result = compare(case, Zigzag.of(groups[ranks]))
                found[f"{name}, {ranks} ranks"] = result
            distributed.barrier()
    if rank == ROOT:
        file.write_text(json.dumps(found))
    distributed.destroy_process_group()


def compare(case: Case, zigzag: Zigzag) -> dict | None:
    """On the first rank: for each tensor whether it is bitwise that of one rank, and the distance relative to it."""
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1" if case.interpreter else "0"
    torch.manual_seed(0)
    dtype = torch.float16 if case.interpreter else getattr(torch, case.dtype)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, do = (torch.randn(case.tokens, case.batch, h, case.dim).to(dtype) for h in heads)
    k = k + torch.randn(1, 1, case.kv_heads, case.dim).to(dtype)  # a common offset, as trained keys have
    mine = [zigzag.cut(x, 0).requires_grad_() for x in (q, k, v)]
    if case.config is None:
        kernel = GPU[getattr(SDPBackend, case.kernel)] if ON_GPU else CPU
        o = heads_last(context_sdpa(*map(heads_first, mine), zigzag, kernel, None))
    else:
        o = sage_attention_context(*mine, zigzag=zigzag, config=case.config)
    o.backward(zigzag.cut(do, 0))
    gathered = [*zigzag.gather(*((x, 0) for x in (o, *(x.grad for x in mine)))), *operands(mine, zigzag, case.config)]
    if zigzag.rank != ROOT:
        return None
    whole = [x.requires_grad_() for x in (q, k, v)]
    if case.config is None:
        with sdpa_kernel(getattr(SDPBackend, case.kernel if ON_GPU else "FLASH_ATTENTION")):
            o = scaled_dot_product_attention(*map(heads_first, whole), is_causal=True, enable_gqa=True)
        expected = heads_last(o)
    else:
        expected = sage_attention(*whole, causal=True, config=case.config, layout="nbhd")
    expected.backward(do)
    one = [expected, *(x.grad for x in whole), *operands(whole, None, case.config)]
    names = ("o", "dq", "dk", "dv", "k_hat", "k_scale", "v_hat", "v_scale")
    return {
        name: {"equal": torch.equal(a, b), "difference": _distance(a, b), "dtype": str(a.dtype)}
        for name, a, b in zip(names[: len(one)], gathered, one, strict=True)
    }


def heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def heads_last(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


def operands(qkv: list[Tensor], zigzag: Zigzag | None, config: QuantConfig | None) -> list[Tensor]:
    """K^ and V^ with their scales, as they travel; without a zigzag, those of one rank. None in full precision."""
    if config is None:
        return []
    q, k, v = (heads_first(x.detach()) for x in qkv)
    backend = context._module(backend_for(q))
    sums, tokens = backend.key_sums(k), k.shape[2]
    if zigzag:
        (sums,) = zigzag.gather((sums, backend.SLOT_DIM))
        tokens *= zigzag.size
    _, keys, values = backend.round_operands(q, k, v, sums, tokens, config)
    if zigzag is None:
        return [*keys, *values]
    return zigzag.gather(*zip((*keys, *values), backend.KEY_DIMS + backend.VALUE_DIMS, strict=True))


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm()).item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
