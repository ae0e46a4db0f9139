"""What a training step will need, from a recipe alone: memory of a GPU, and time. Imports no torch.

Memory is a count of tensors, exact but for what is alive only for a moment. Time adds what the parts take one after
another: matrix products and attention at measured rates, everything else at the memory's bandwidth; or, if that is
more, what the host takes to launch it all. Rates were measured on an H200 (recipes/results/llama-125m-h200,
recipes/results/small-h200, kernels/benchmarks/results) and are scaled to other GPUs by their data sheets, which is a
guess. It is a forecast for planning, meant to be right to a quarter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagebwd.gpus import SPECS, Spec
from sagebwd.training import budget
from sagebwd.training.recipe import Recipe
from sagebwd.training.size import flops_per_token, matrix_parameters, padded_vocab_size, parameter_counts

H200 = SPECS["NVIDIA H200"]
GIB = 2**30

# Dense products: of the peak, for wide matrices; narrow ones come to hidden / (hidden + NARROW) of that (assumed).
PRODUCT_SHARE, NARROW = 0.75, 160
# Attention, forward + backward, TFLOP/s by length, causal: kernels/benchmarks/results/nvidia-h200/results.csv; SageBwd
# and 1024 by triton.testing.do_bench on commit 79e6470, which leaves out the host's share. With products="scores":
# results/nvidia-h200-scores (8d0f6d8).
ATTENTION = {
    ("fpa", 64): {1024: 271.6, 4096: 384.0, 16384: 427.9},  # SDPA cuDNN
    ("fpa", 128): {1024: 347.3, 4096: 484.5, 16384: 540.8},
    ("all", 64): {1024: 185.7, 4096: 300.7, 16384: 373.0},
    ("all", 128): {1024: 194.4, 4096: 361.1, 16384: 453.6},
    ("scores", 64): {1024: 253.8, 4096: 467.1, 16384: 582.3},
    ("scores", 128): {1024: 321.7, 4096: 592.8, 16384: 714.8},
}
COPY_SHARE = 0.89  # of the data sheet's bandwidth: 4.26 of 4.8 TB/s in a device copy
# Reads and writes of the residual stream (times hidden) and of the feed-forward (times ffn), elements a token and
# layer, forward and backward. Fused: counted from what is compiled, at FUSED_SHARE of a copy's speed (assumed).
# Separate: fitted to llama-125m-h200; a third of it is many passes, the rest kernels that are slow on narrow rows.
FUSED_HIDDEN, FUSED_FFN, FUSED_SHARE = 46, 8, 0.6
SEPARATE_HIDDEN, SEPARATE_FFN = 260, 46
# Bytes a logit: kept and made at the widest moment; read and written.
LOGIT_MEMORY, LOGIT_TRAFFIC = {True: 4, False: 6}, {True: 12, False: 50}
OPTIMIZER_BYTES, ACCUMULATE_BYTES = 100, 10  # read and written a parameter: AdamW in separate passes; a micro-batch
HOST_LAYER, HOST_STEP = {"fpa": 3.0e-3, "sagebwd": 4.5e-3}, 6e-3  # seconds: a layer's launches both ways; a step's rest
# Context parallelism, bytes a layer and token for each element of its queries and of its keys: what arrives of another
# rank's token, forward and backward; and what is there of every rank's tokens at the backward's widest moment
GATHERED = {"fpa": (0, 4 + 4 + 4), "sagebwd": (3, 2 + 3)}
GATHERED_MOMENT = {"fpa": (0, 8 + 8 + 4), "sagebwd": (8, 6)}
NVLINK = 400e9  # bytes a second of an all-reduce inside a node (assumed)
WORKSPACE = 64 << 20  # bytes that cuBLAS and the like keep
START = 40.0  # seconds until the first step: imports, compilation, data


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the widest moment of a step, as torch.cuda.max_memory_allocated counts: without CUDA's own
    0.5 GiB and what the allocator keeps in reserve."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    widest: float  # alive only for a moment: logits and their gradient, or a layer's backward; and workspaces

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.widest


@dataclass(frozen=True)
class Forecast:
    """Of one arm. step_seconds: by part in `parts`. seconds: the whole run, with validations and the start."""

    plan: budget.Plan
    parameters: dict[str, int]
    flops_per_token: float
    memory: Memory
    parts: dict[str, float]
    step_seconds: float
    host_bound: bool
    tokens_per_second: float
    mfu: float
    seconds: float


def forecast(recipe: Recipe, gpu: Spec, ranks: int) -> Forecast:
    """Of a recipe's training on `ranks` GPUs of one node; "auto" is taken as on a GPU. UserError: as budget.plan."""
    dp = budget.data_parallel_size(recipe, ranks)
    plan = budget.plan(recipe, dp)
    vocab = recipe.data.vocab_size
    parts = _step_parts(recipe, gpu, plan, dp)
    device = math.fsum(parts.values())
    layers = recipe.model.layers / recipe.parallel.pipeline
    host = plan.accumulation * layers * HOST_LAYER[recipe.attention.kind] + HOST_STEP
    step = max(device, host)
    flops = flops_per_token(recipe, vocab)
    speed = recipe.train.tokens_per_step / step
    validations = 1 + -(-plan.steps // recipe.evaluation.every_steps)
    validated = recipe.evaluation.tokens / speed / 3  # forward alone
    return Forecast(
        plan=plan,
        parameters=parameter_counts(recipe, vocab),
        flops_per_token=flops,
        memory=memory(recipe, ranks),
        parts=parts,
        step_seconds=step,
        host_bound=host > device,
        tokens_per_second=speed,
        mfu=speed * flops / (gpu.tflops * 1e12 * ranks),
        seconds=START + plan.steps * step + validations * validated,
    )


def memory(recipe: Recipe, ranks: int) -> Memory:
    """Bytes on one GPU, see Memory."""
    m, t, stages = recipe.model, recipe.parallel.tensor, recipe.parallel.pipeline
    half, fused = recipe.train.precision != "fp32", recipe.train.fusion != "off"
    element = 2 if half else 4
    data = budget.data_parallel_size(recipe, ranks)
    replicas = data * recipe.parallel.context
    parameters = _parameters(recipe)
    tokens = recipe.train.micro_batch * recipe.data.context // recipe.parallel.context
    vocabulary = padded_vocab_size(recipe.data.vocab_size, t) / t
    between = m.hidden / _sequence(recipe)
    of_micro_batch = tokens * (m.layers / stages * layer_activations(recipe) + 2 * between * element)
    # The first stage has as many micro-batches under way as there are stages, the last one, with the logits
    under_way = min(stages, budget.plan(recipe, data).accumulation)
    of_logits = LOGIT_MEMORY[fused] * (element / 2) * vocabulary
    of_layer = max(
        element * (3 * m.ffn / t + 6 * between), _gathered(recipe, GATHERED_MOMENT) * recipe.parallel.context
    )
    first, last = (under_way * of_micro_batch, tokens * of_layer), (of_micro_batch, tokens * max(of_logits, of_layer))
    activations, moment = max(first, last, key=sum)
    weights, gradients, optimizer = _held(recipe, replicas)
    return Memory(
        weights=element * parameters * weights,
        gradients=4 * parameters * gradients,
        optimizer=(12 if half else 8) * parameters * optimizer,
        activations=activations,
        widest=WORKSPACE + max(moment, 4 * parameters - activations),  # or AdamW's
    )


def _held(recipe: Recipe, replicas: int) -> tuple[float, float, float]:
    """The shares of weights, gradients and optimizer that one of the ranks with the same weights holds on its GPU."""
    parallel = recipe.parallel
    if parallel.engine == "megatron":
        return 1, 1, 1 / replicas if parallel.distributed_optimizer else 1
    weights, gradients, optimizer = (1 / replicas if parallel.zero_stage >= stage else 1 for stage in (3, 2, 1))
    return weights, gradients, 0 if parallel.offload == "cpu" else optimizer


def _parameters(recipe: Recipe) -> float:
    """Of the GPU with the most: one at an end of the pipeline, which has the embedding or its counterpart."""
    counts = parameter_counts(recipe, recipe.data.vocab_size)
    embeddings = counts["total"] - counts["non_embedding"]
    if recipe.parallel.pipeline > 1 and not recipe.model.tied_embeddings:
        embeddings /= 2
    return (counts["non_embedding"] / recipe.parallel.pipeline + embeddings) / recipe.parallel.tensor


def layer_activations(recipe: Recipe) -> float:
    """Bytes that a layer keeps of a token for its backward, on one tensor-parallel rank.

    In elements: both norms' inputs and outputs (4 hidden), the fused QKV that the value and QK-norm read, the output
    of attention, the feed-forward's input (2 ffn) and product (ffn). Attention keeps its queries and keys: full
    precision after RoPE as they are, and so does SageBwd with products="scores", else in INT8. Separate operations keep
    two more ffn: silu of the gate, and the other half. FP32: the logarithm of the softmax's sum, and each normalised
    row's 1 / rms.
    """
    m, t, fused = recipe.model, recipe.parallel.tensor, recipe.train.fusion != "off"
    element = 4 if recipe.train.precision == "fp32" else 2
    queries, keys = m.heads * m.dim / t, m.num_kv_heads * m.dim / t
    grouped = queries if m.qk_norm and m.num_kv_heads < m.heads else 0  # copied out of the fused QKV for QK-norm
    between = m.hidden / _sequence(recipe)
    elements = 4 * between + (queries + 2 * keys) + grouped + queries + (3 if fused else 5) * m.ffn / t
    inside = (queries + keys) * element
    if recipe.attention.kind == "sagebwd" and recipe.attention.quant.products == "all":
        inside = queries + keys + (keys * element if recipe.attention.quant.smooth_q else 0)
    rows = m.heads / t + 2 / _sequence(recipe) + ((m.heads + m.num_kv_heads) / t if m.qk_norm else 0)
    return elements * element + inside + 4 * rows


def _sequence(recipe: Recipe) -> int:
    """Ranks that share what lies between the matrices."""
    return recipe.parallel.tensor if recipe.parallel.sequence else 1


def _gathered(recipe: Recipe, table: dict[str, tuple[int, int]]) -> float:
    """Bytes a token and layer on one tensor-parallel rank, by GATHERED or GATHERED_MOMENT; 0 without context ranks."""
    m, (of_queries, of_keys) = recipe.model, table[recipe.attention.kind]
    if recipe.parallel.context == 1:
        return 0.0
    return (of_queries * m.heads + of_keys * m.num_kv_heads) * m.dim / recipe.parallel.tensor


def _step_parts(recipe: Recipe, gpu: Spec, plan: budget.Plan, dp: int) -> dict[str, float]:
    """Seconds of a step on the device, by part.

    Stages of a pipeline are taken to have as much to do each; they wait for one another as long as (stages - 1)
    micro-batches take.
    """
    m, t, fused = recipe.model, recipe.parallel.tensor, recipe.train.fusion != "off"
    context = recipe.parallel.context
    tokens = recipe.train.tokens_per_step / dp / context  # of a rank
    bandwidth = gpu.bandwidth * 1e12 * COPY_SHARE
    vocabulary = padded_vocab_size(recipe.data.vocab_size, 1)
    parameters = _parameters(recipe)
    stages = recipe.parallel.pipeline
    products = 6 * (matrix_parameters(recipe) + vocabulary * m.hidden) * tokens / t
    rate = PRODUCT_SHARE * m.hidden / (m.hidden + NARROW) * gpu.tflops * 1e12
    attention = 7 * recipe.data.context * m.heads * m.dim * m.layers * tokens / t  # forward 2, backward 5, causal
    if fused:
        passes = (FUSED_HIDDEN * m.hidden / _sequence(recipe) + FUSED_FFN * m.ffn / t) / FUSED_SHARE
    else:
        passes = SEPARATE_HIDDEN * m.hidden / _sequence(recipe) + SEPARATE_FFN * m.ffn / t
    parts = {
        "matrix products": products / rate,
        "attention": attention / (_attention_rate(recipe) * 1e12 * gpu.tflops / H200.tflops),
        "element-wise": 2 * passes * m.layers * tokens / bandwidth,
        "loss": LOGIT_TRAFFIC[fused] * vocabulary / t * tokens / bandwidth,
        "optimizer": (OPTIMIZER_BYTES + ACCUMULATE_BYTES * plan.accumulation) * parameters / bandwidth,
    }
    if stages > 1:
        together = math.fsum(parts[part] for part in ("matrix products", "attention", "element-wise", "loss"))
        for part in ("matrix products", "attention", "element-wise", "loss"):
            parts[part] /= stages
        parts["waiting for other stages"] = together / stages * (stages - 1) / plan.accumulation
    replicas = dp * context
    if replicas > 1:
        parts["gradients over ranks"] = 2 * (replicas - 1) / replicas * 4 * parameters / NVLINK
    if context > 1:
        arriving = (context - 1) * tokens * m.layers / stages * _gathered(recipe, GATHERED)
        parts["attention's operands over ranks"] = arriving / NVLINK
    if t > 1:
        parts["activations over ranks"] = 4 * m.layers / stages * 2 * (t - 1) / t * 2 * m.hidden * tokens / NVLINK
    return parts


def _attention_rate(recipe: Recipe) -> float:
    """TFLOP/s at the recipe's context, on a line between the measured lengths' logarithms; its ends beyond them."""
    attention = recipe.attention
    which = attention.quant.products if attention.kind == "sagebwd" else attention.kind
    table = ATTENTION[which, 64 if recipe.model.dim <= 64 else 128]
    lengths = sorted(table)
    length = min(max(recipe.data.context, lengths[0]), lengths[-1])
    above = next(index for index, known in enumerate(lengths) if known >= length)
    if above == 0:
        return table[lengths[0]]
    low, high = lengths[above - 1], lengths[above]
    share = math.log(length / low) / math.log(high / low)
    return table[low] + share * (table[high] - table[low])
