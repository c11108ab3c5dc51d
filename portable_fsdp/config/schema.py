"""The config of a run, identical on all devices. The string below each field gives its meaning and unit.

`--device`, `--backend` and `--num_devices` are flags of the launcher, never config keys.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import Field, Strict, field_validator, model_validator

from portable_fsdp.config.data import PERCENT, Data, Section
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import FACTORY_PATTERN

TASKS = "causal_lm|seq2seq_lm|masked_lm|sequence_classification|token_classification|image_classification"
"""Tasks of transformers models."""

REMOVED = {
    "run.preemption": "removed, and sets nothing: only signals stop a run. On TPU VMs the scripts of launch/ send one "
    "at a notice of preemption; elsewhere let your platform send SIGTERM or SIGUSR1",
    "xla_fsdp1.buffer_dtype": "removed: precision.buffers sets the dtype of buffers on every engine. In a file of an "
    "earlier release bfloat16 means precision.buffers=bfloat16",
}
"""Keys that only files of earlier releases hold, and what replaces each."""


def with_successors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values, as a file or a checkpoint of any release holds them, without removed keys; what a
    removed key set, the key that replaces it sets."""
    kept = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in REMOVED}
        if isinstance(keys, Mapping)
        else keys
        for section, keys in values.items()
    }
    flat = {
        f"{section}.{key}": keys[key] for section, keys in values.items() if isinstance(keys, Mapping) for key in keys
    }
    precision = values.get("precision", {})
    if flat.get("xla_fsdp1.buffer_dtype") == "bfloat16" and flat.get("precision.buffers", "auto") == "auto":
        kept["precision"] = {**precision, "buffers": "bfloat16"} if isinstance(precision, Mapping) else precision
    return kept


Interval = Annotated[int, Ge(1)] | Annotated[str, PERCENT]


class Needs:
    """In the annotation of a key: the setting without which it has no effect. Every engine then refuses the key.

    `Needs("memory.gradient_checkpointing=full|selective")`: one of these words; without words: any other value than the
    default. `fix`: the settings that a message proposes, by default the first word; empty: none but the key's default.
    """

    def __init__(self, setting: str, fix: str | None = None) -> None:
        self.key, _, words = setting.partition("=")
        self.words = words.split("|") if words else []
        self.fix = f"{self.key}={self.words[0]}" if fix is None and words else fix or ""


class Run(Section):
    dir: str = Field(default="runs/run", min_length=1)
    """local folder for all output of the run"""
    name: str | None = Field(default=None, pattern=r"^[^\x00-\x1f\x7f]*$")
    """name of the run in events.jsonl and in checkpoints; printable characters"""
    seed: int = Field(default=0, ge=0)
    """seed of the initial weights and of the data order"""
    # A process may miss heartbeats for a while (it holds the GIL, its host swaps). The timeout of collectives can't
    # serve as this bound: it must exceed the longest save.
    peer_timeout_s: float = Field(default=120.0, ge=5)
    """seconds without a heartbeat after which a process counts as lost and all processes exit"""
    step_timeout_s: Annotated[float, Ge(1)] | Literal["auto"] = "auto"
    """seconds after which a step, an evaluation or a save counts as hung, and its process is ended; auto: for a step 10
    times the median, at least 60, for the rest and the first steps 3 times the longest, at least 1800"""
    max_restarts: int = Field(default=3, ge=0)
    """restarts after a failure, counted anew whenever the run gets further; for runs without a launcher"""
    grace_s: float = Field(default=30.0, gt=0)
    """seconds between a stop request and the end of the host or the process; the run warns if its save doesn't fit"""

    @field_validator("dir")
    @classmethod
    def _local(cls, value: str) -> str:
        """Refuse URLs: as a path, `s3://` is a local folder named `s3:`, and the error would come after a save."""
        if "://" in value:
            raise ValueError(
                f"expected a local folder, found the URL {value!r}: metrics, events and config are written locally.\n"
                "  For checkpoints in an object store, set checkpoint.dir to the URL and run.dir to a folder"
            )
        return value


class Lora(Section):
    """Low-rank adapters (peft)."""

    r: int = Field(default=16, ge=1)
    """rank of the adapters"""
    alpha: float = Field(default=32.0, gt=0)
    """the adapters' output is scaled by alpha / r"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """share of an adapter's inputs that is set to 0 in training, each step others"""
    rslora: bool = False
    """scale by alpha / sqrt(r) instead, which keeps the size of gradients at any r (arXiv 2312.03732)"""
    dora: bool = False
    """also train the norm of each output's weights (DoRA, arXiv 2402.09353)"""
    rank_pattern: dict[str, Annotated[int, Ge(1)]] = Field(default={})
    """r of some layers: the last parts of their names, or a regular expression (peft's rules); the first match"""
    alpha_pattern: dict[str, Annotated[float, Gt(0)]] = Field(default={})
    """alpha of some layers, named as in rank_pattern"""
    train_whole: tuple[str, ...] = Field(default=(), strict=False)
    """modules whose own weights train (embed_tokens, lm_head): name patterns or last parts of names"""
    targets: Annotated[tuple[str, ...], MinLen(1), Strict(False)] | str = ("all-linear",)
    """linear layers, or weights of experts, by name patterns or last parts of names; all-linear: all but the head; a
    text instead of a list: one regular expression of whole names, as in peft"""
    start_from: str | None = None
    """local folder or hub id of peft adapters to start from, with the same settings but dropout; null: new adapters"""


def resolve_dropout(dropout: Any, pretrained: str | None) -> Any:
    """Return `model.dropout` without null: `published` with `model.pretrained`, else 0."""
    default = 0.0 if pretrained is None else "published"
    return default if dropout is None else dropout


class Model(Section):
    architecture: dict[str, Any] | str | None = None
    """train from scratch, weights initialized from run.seed: the content of a transformers config.json (at least
    `model_type` and the sizes), or the path of such a file or of its folder"""
    pretrained: str | None = None
    """local folder in Hugging Face format with safetensors weights, or a hub id: org/name, org/name@revision"""
    factory: str | None = Field(default=None, pattern=FACTORY_PATTERN)
    """your own model: `module:function` that returns a torch.nn.Module; the module is imported from the config's
    folder or PYTHONPATH"""
    gguf_file: str | None = Field(default=None, min_length=1)
    """GGUF file in model.pretrained (llama, qwen2, qwen3); supplies weights (dequantised), config and tokenizer"""
    allow: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of tensors that may be missing from model.pretrained (initialized from run.seed) or unexpected in
    it (not loaded); `data.tokenizer`: its ids may differ from the model's"""
    attention: Literal["auto", "static", "flex", "sdpa", "eager"] = "auto"
    """implementation of attention; auto: flex for packed documents, windows and sinks in compiled layers on GPUs, else
    static, if the model supports it; static: one implementation for all engines; flex: torch's flex_attention, which
    skips masked blocks (GPUs only); sdpa, eager: from transformers"""
    experts: Literal["auto", "dense", "batched_mm", "grouped_mm"] = "auto"
    """implementation of a mixture of experts; grouped_mm: sort tokens by expert, and multiply by groups; dense: every
    expert on every token, weighted; batched_mm: copy the selected weights per token; auto: by groups, dense where no
    kernel multiplies by groups"""
    dropout: Annotated[float, Ge(0), Lt(1)] | Literal["published"] | None = None
    """rate of all dropouts of a transformers model, with masks that no device or engine changes; published: the rates
    of its config; null: published with model.pretrained, else 0"""
    router_bias_rate: float = Field(default=0.0, ge=0)
    """after each step the bias of an expert with fewer tokens than the mean rises by this, with more falls; 0: biases
    stay; DeepSeek-V3: 0.001"""
    freeze: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of frozen parameters or modules: no gradient, no optimizer state; `*` matches any text"""
    train_only: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of the parameters or modules that train; all others are frozen, as by model.freeze"""
    lora: Lora | None = None
    """train only low-rank adapters (LoRA); `{}`: with default settings; null: no adapters"""

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if sum(source is not None for source in (self.architecture, self.pretrained, self.factory)) != 1:
            names = [key for key in ("architecture", "pretrained", "factory") if getattr(self, key) is not None]
            fix = f"; model.{names[0]}=null or model.{names[1]}=null unsets one" if names else ""
            raise ValueError(f"set exactly one of model.architecture, model.pretrained and model.factory{fix}")
        if isinstance(self.architecture, dict) and not isinstance(self.architecture.get("model_type"), str):
            raise ValueError("model.architecture needs a `model_type` (llama, qwen3, gpt2, ...)")
        if self.factory is not None and self.dropout is not None:
            raise ValueError(
                "model.dropout needs a transformers model; set the rates in model.factory, and leave it out"
            )
        for key in ("gguf_file", "allow"):
            if self.pretrained is None and getattr(self, key):
                raise ValueError(f"model.{key} needs model.pretrained")
        return self

    @property
    def freezes(self) -> bool:
        """Whether some weights don't train."""
        return bool(self.freeze or self.train_only or self.lora is not None)

    @property
    def resolved_dropout(self) -> float | Literal["published"]:
        """`dropout` without null."""
        return resolve_dropout(self.dropout, self.pretrained)


class Train(Section):
    task: str = Field(default="causal_lm", pattern=f"^({TASKS})$|{FACTORY_PATTERN}")
    """loss of a batch: causal_lm, seq2seq_lm, masked_lm, sequence_classification, token_classification,
    image_classification; or `module:function`, which gets the model and a batch and returns the sum of the losses
    and their count"""
    steps: int | None = Field(default=None, ge=1)
    """optimizer updates in the whole run"""
    epochs: float | None = Field(default=None, gt=0)
    """passes over the data, instead of train.steps; one pass over a mixture has as many rows as all its sources"""
    global_batch: int = Field(default=8, ge=1)
    """sequences per step, over all devices and micro batches"""
    micro_batch: Annotated[int, Ge(1)] | Literal["auto"] = 1
    """most sequences per device in one forward and backward pass; auto: the fastest that the plan fits into memory"""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """clip the global gradient norm to this value; null: no clipping"""
    log_every: int = Field(default=10, ge=1)
    """steps between console lines"""
    eval_every: Annotated[Interval | None, Needs("data.eval_split", "data.eval_split=5%")] = None
    """steps, or a share of the run's (25%), between evaluations on data.eval_split, and after the last; null: never"""
    eval_on_start: Annotated[bool, Needs("train.eval_every")] = False
    """also evaluate before the first step, as a baseline"""
    eval_batches: Annotated[int | None, Needs("train.eval_every")] = Field(default=None, ge=1)
    """evaluate at most this many batches of train.global_batch sequences, spread evenly over the validation set;
    null: all rows"""
    patience: Annotated[int | None, Needs("train.eval_every")] = Field(default=None, ge=1)
    """stop after this many evaluations without improvement; null: never"""
    stop_at: int | None = Field(default=None, ge=1)
    """stop at this step; the schedule still spans train.steps"""
    sample_every: Annotated[int | None, Needs("train.sample_prompts", "train.sample_prompts=['The ']")] = Field(
        default=None, ge=1
    )
    """steps between samples generated from train.sample_prompts, and after the last step; null: never"""
    sample_prompts: Annotated[tuple[str, ...], Needs("train.sample_every")] = Field(default=(), strict=False)
    """prompts that the model completes"""
    sample_tokens: Annotated[int, Needs("train.sample_every")] = Field(default=64, ge=1)
    """maximum number of new tokens per prompt"""

    @property
    def resolved_micro_batch(self) -> int:
        """`micro_batch` as a number. Raises ConfigError for `auto`, which `train.loop.train` resolves."""
        if self.micro_batch == "auto":
            raise ConfigError("train.micro_batch: expected a number, found auto.\n  `plan` prints one.")
        return self.micro_batch

    @model_validator(mode="after")
    def _one_length(self) -> "Train":
        if (self.steps is None) == (self.epochs is None):
            fix = "" if self.steps is None else "; train.steps=null or train.epochs=null unsets one"
            raise ValueError(f"set exactly one of train.steps and train.epochs{fix}")
        return self


class OptimGroup(Section):
    match: str = Field(min_length=1)
    """name pattern of parameters or modules"""
    lr: float | None = Field(default=None, gt=0)
    """peak learning rate of the group; null: optim.lr"""
    weight_decay: float | None = Field(default=None, ge=0)
    """weight decay of all tensors of the group; null: as without the group"""


DecayRate = Annotated[float, Ge(0), Lt(1)]


class Optim(Section):
    name: Literal["adamw", "adam", "sgd", "adafactor", "lion", "muon", "adamw8bit"] = "adamw"
    """optimizer; muon: Muon for hidden matrices, AdamW for the rest; adamw8bit: AdamW with 8-bit moments
    (bitsandbytes)"""
    factory: str | None = Field(default=None, pattern=FACTORY_PATTERN)
    """your own optimizer: `module:function` (docs/optimizers.md)"""
    lr: float = Field(default=3e-4, gt=0)
    """peak learning rate"""
    betas: Annotated[tuple[DecayRate, DecayRate], Needs("optim.name=adamw|adam|lion|muon|adamw8bit")] = Field(
        default=(0.9, 0.95), strict=False
    )
    """betas of AdamW, Adam and Lion (decay rates of the moments)"""
    eps: Annotated[float, Needs("optim.name=adamw|adam|muon|adamw8bit")] = Field(default=1e-8, gt=0)
    """epsilon of AdamW and Adam"""
    momentum: Annotated[float, Needs("optim.name=sgd|muon")] = Field(default=0.0, ge=0, lt=1)
    """momentum of SGD and Muon"""
    weight_decay: float = Field(default=0.1, ge=0)
    """decoupled weight decay of matrices; adam: added to the gradient (L2)"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """shape of the learning rate after warmup; wsd: warmup, stable, decay"""
    warmup_steps: Annotated[int, Ge(0)] | Annotated[str, PERCENT] = 0
    """steps of linear warmup, or their share of all steps (`5%`), rounded up"""
    min_lr_ratio: Annotated[float, Needs("optim.schedule=cosine|linear|wsd")] = Field(default=0.1, gt=0, le=1)
    """final learning rate of the schedule as a share of lr; never 0, which would make XLA recompile"""
    decay_ratio: Annotated[float, Needs("optim.schedule=wsd")] = Field(default=0.2, gt=0, le=1)
    """share of train.steps in the decay phase of wsd"""
    groups: tuple[OptimGroup, ...] = Field(default=(), strict=False)
    """parameter groups with their own lr or weight decay; the first match counts"""


TensorWord = Literal[
    "colwise",
    "packed_colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "replicated",
]


class Sharding(Section):
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"] = "FULL_SHARD"
    """FULL_SHARD: shard parameters, gradients and optimizer state (ZeRO-3); SHARD_GRAD_OP: keep gathered parameters
    until backward (ZeRO-2); NO_SHARD: replicate (DDP); HYBRID_SHARD, HYBRID_SHARD_ZERO2: ZeRO-3 or ZeRO-2 within a
    replica, DDP across replicas"""
    replicas: Annotated[int | None, Needs("sharding.strategy=HYBRID_SHARD|HYBRID_SHARD_ZERO2")] = Field(
        default=None, ge=1
    )
    """number of replicas under HYBRID_SHARD*; null: one per host"""
    reshard_after_forward: int | None = Field(default=None, ge=2)
    """after forward, reshard parameters over this many devices only; null: as the strategy; torch's true is
    sharding.strategy=FULL_SHARD here, false sharding.strategy=SHARD_GRAD_OP"""
    expert: int = Field(default=1, ge=1)
    """expert parallelism: this many devices divide the experts of a mixture, and exchange tokens in each layer"""
    expert_capacity: Annotated[float | None, Needs("sharding.expert")] = Field(default=None, ge=1)
    """with expert: room for tokens in exchanges, in multiples of an even load; tokens beyond it are dropped; null: room
    for all"""
    context: int = Field(default=1, ge=1)
    """context parallelism: this many devices split the tokens of each row"""
    tensor: int = Field(default=1, ge=1)
    """tensor parallelism: this many neighbouring devices get the same rows and split attention heads, MLPs and the
    vocabulary"""
    sequence_parallel: Annotated[bool | Literal["auto"], Needs("sharding.tensor")] = "auto"
    """with tensor: between attention and MLPs each device holds a part of each row's tokens; auto: if they divide"""
    plan: Annotated[dict[str, TensorWord], Needs("sharding.tensor")] = Field(default={})
    """with tensor: name pattern of modules -> word of a tensor-parallel plan, before transformers' own plan"""
    wrap: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    """FSDP units, whose parameters are gathered and freed together: the model's layers, modules of at least
    min_num_params, or the whole model"""
    wrap_classes: tuple[str, ...] = Field(default=(), strict=False)
    """module classes to treat as layers instead of the model's own: recomputed, compiled, and wrapped under
    TRANSFORMER_BASED_WRAP"""
    wrap_modules: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of additional modules to wrap as units"""
    min_num_params: Annotated[int | None, Needs("sharding.wrap=SIZE_BASED_WRAP")] = Field(default=None, ge=1)
    """minimum number of parameters of a unit under SIZE_BASED_WRAP"""
    forward_prefetch: int = Field(default=0, ge=0)
    """units to prefetch in forward; 0: the engine's default"""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"
    """in backward, all-gather the next units before computing the current unit's gradients, after it, or on demand"""
    backward_prefetch_units: Annotated[int, Needs("sharding.backward_prefetch=BACKWARD_PRE")] = Field(default=1, ge=1)
    """units to prefetch in backward"""
    sync_each_micro_batch: bool = True
    """reduce gradients over shards after each micro batch; false: once per step, which keeps unsharded gradients in
    memory until then"""

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


DType = Literal["float32", "bfloat16", "float16"]


LEAST_LOSS_SCALE = 1
"""The run ends if gradients overflow at this scale, like DeepSpeed's min_loss_scale."""
LARGEST_LOSS_SCALE = 2.0**127  # doubling it gives infinity in float32


class Precision(Section):
    master: Literal["float32", "bfloat16"] = "float32"
    """dtype of stored weights and optimizer state"""
    frozen: Literal["auto", "float32", "bfloat16", "nf4", "nf4_double", "int8"] = "auto"
    """form of stored frozen weights (model.freeze, the base of model.lora); auto: precision.master; nf4: linear layers
    and experts in 4 bits (QLoRA), nf4_double: with 8-bit scales; int8: in 8 bits; from model.pretrained"""
    compute: DType = "float32"
    """dtype of forward and backward"""
    reduce: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the gradient reduction over devices; auto: float32 if the engine supports it"""
    output: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the logits that enter the loss, and of the numbers that a model returns to a task; auto: the model's"""
    buffers: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of floating-point buffers (rotary frequencies, running means); auto: the model's own"""
    cast_inputs: bool = True
    """cast floating-point inputs of the model and of each FSDP unit to the compute dtype; false: leave inputs
    unchanged"""
    modules: dict[str, DType] = Field(default={})
    """name pattern of modules -> compute dtype, such as float32 for norms, a router or the head; the first match
    counts"""
    products: Annotated[Literal["auto", "float8", "float8_rowwise", "int8"], Needs("precision.compute=bfloat16")] = (
        "auto"
    )
    """matrix products of linear layers inside the model's layers; auto: compute dtype; float8: one scale per tensor,
    float8_rowwise: one per row (GPUs); int8: TPU v5e and v5p"""
    matmul: Literal["highest", "high", "default"] = "highest"
    """precision of float32 matrix products; highest: float32; high: TF32 on GPUs, three bfloat16 passes on TPUs;
    default: the fastest of the device"""
    loss_scale: float = Field(default=65536.0, ge=LEAST_LOSS_SCALE, le=LARGEST_LOSS_SCALE)
    """float16: initial loss scale; halved when gradients overflow"""
    loss_scale_window: int = Field(default=2000, ge=1)
    """float16: double the loss scale after this many steps without overflow"""

    @property
    def scheme(self) -> str | None:
        """How frozen weights are quantised; None: they aren't."""
        return self.frozen if self.frozen in ("nf4", "nf4_double", "int8") else None

    @property
    def dtypes(self) -> set[str]:
        """Compute dtypes that weights are cast to."""
        return {self.compute, *self.modules.values()}


_SELECTIVE = "memory.gradient_checkpointing=selective"


class Memory(Section):
    gradient_checkpointing: Literal["auto", "none", "full", "selective", "budget"] = "none"
    """recompute activations in backward; full: every layer; selective: every memory.every-th layer, or all outputs
    except those of memory.save_ops; budget: compiled layers keep a share (memory.budget), recompute the rest; auto: the
    fastest by plan of none, selective and full that fits into memory; full on an engine without a planner"""
    budget: Annotated[float, Needs("memory.gradient_checkpointing=budget", "")] = Field(default=0.5, ge=0, le=1)
    """budget: share of a compiled layer's activations to keep; torch.compile's partitioner recomputes the rest,
    cheapest first"""
    every: Annotated[int | None, Needs(_SELECTIVE, f"{_SELECTIVE} and memory.save_ops=[]")] = Field(default=None, ge=1)
    """selective: recompute every n-th layer, starting with the first"""
    save_ops: Annotated[
        tuple[Literal["matmul", "attention"], ...], Needs(_SELECTIVE, f"{_SELECTIVE} and memory.every=null")
    ] = Field(default=(), strict=False)
    """selective: operations whose outputs every layer keeps"""
    classes: Annotated[tuple[str, ...], Needs("memory.gradient_checkpointing=full|selective")] = Field(
        default=(), strict=False
    )
    """module classes to recompute instead of the layers: parts of a layer, or containers of several"""
    offload: Literal["none", "activations"] = "none"
    """activations: keep the inputs of recomputed layers in host memory until backward"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state in host memory"""


class Compile(Section):
    enabled: bool | Literal["auto"] = False
    """torch.compile each layer; XLA always compiles; auto: on GPUs, if layers compile to one program without a break
    and the run saves more time than the compiler takes"""
    backend: Literal["auto", "inductor", "aot_eager", "eager"] = "auto"
    """backend of torch.compile; auto: inductor on cuda, TorchTPU's own on tpu; inductor needs a GPU here"""
    cache_dir: str | None = None
    """cache of compiled programs for later starts: inductor's kernels (null: TORCHINDUCTOR_CACHE_DIR, or portable_fsdp
    in the user's cache folder), and TorchTPU's programs (null: none)"""
    scan_layers: bool = False
    """XLA: compile one layer and loop over it, instead of one copy per layer"""

    @property
    def compiler(self) -> str | None:
        """`backend` if torch.compile is enabled, else None."""
        return self.backend if self.enabled is True else None


class Checkpoint(Section):
    dir: str | None = None
    """folder shared by all processes, or object store (s3://, gs://); null: run.dir/checkpoints"""
    every: Interval | None = None
    """steps between saves, or a share of the run's steps (25%); the last step is always saved"""
    every_minutes: float | None = Field(default=None, gt=0)
    """minutes between saves, by the clock of process 0"""
    async_save: bool = False
    """save in the background; a step waits only for the copy to host memory"""
    keep: int | None = Field(default=None, ge=1)
    """number of newest checkpoints to keep; null: all"""
    keep_every: Annotated[int | None, Needs("checkpoint.keep", "checkpoint.keep=1")] = Field(default=None, ge=1)
    """with keep: also keep the checkpoints of every n-th step"""
    resume: str = "auto"
    """auto: the run's newest complete checkpoint; none: a new run; or the path or URL of a checkpoint"""
    load: Literal["all", "weights_only"] = "all"
    """weights_only: start a new run with the weights of the checkpoint in checkpoint.resume"""
    allow: tuple[str, ...] = Field(default=(), strict=False)
    """settings that affect the loss and may differ from the checkpoint's (optim.lr, data, train.steps, ...);
    replicas: save although replicas of the weights differ"""
    verify: Literal["full", "size", "off"] = "full"
    """check before loading; full: the hash of every file; size: file sizes; off: only the manifest"""
    export: bool = False
    """at the end, export to run.dir/export in Hugging Face format; with model.lora: peft adapters"""
    merge_adapters: Annotated[bool, Needs("model.lora")] = False
    """with model.lora: export the full model with the adapters merged"""

    @field_validator("dir")
    @classmethod
    def _outlives_the_run(cls, value: str | None) -> str | None:
        if value is not None and "memory://" in value.lower():  # also behind a cache: simplecache::memory://
            raise ValueError(
                f"expected a folder or an object store, found {value!r}: memory:// is lost when the process ends.\n"
                "  Set a folder shared by all processes, an s3:// or gs:// URL, or null for run.dir/checkpoints"
            )
        return value


class XlaFsdp1(Section):
    """Options of the engine xla_fsdp1 only; its other settings are in the other sections."""

    flatten_parameters: bool = False
    """flatten a unit's parameters into one tensor, for one all-gather and one reduce-scatter"""
    shard_param_on_dim_0: bool | None = None
    """shard each parameter along dimension 0; false: flat, padded to 128 elements per device; null: true unless
    flatten_parameters"""
    pin_layout_in_collective_ops: bool | None = None
    """pin the memory layout of inputs and outputs of collectives; null: only on TPUs"""


Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


class Profile(Section):
    """Profile of a range of steps."""

    steps: tuple[int, int] = Field(strict=False)
    """first and last step to profile"""

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"expected the first and last step, such as [20, 23], found {list(steps)}")
        if steps[1] - steps[0] >= 20:
            reason = "each step has tens of thousands of events, and the run waits until they are written"
            raise ValueError(f"expected at most 20 steps, found {list(steps)}: {reason}")
        return steps


class Observe(Section):
    trackers: tuple[Tracker, ...] = Field(default=(), strict=False)
    """experiment trackers that log the metrics (accelerate's tracker classes)"""
    profile: Profile | None = None
    """steps to profile; trace and summary go to run.dir/profile; null: only steps that a file PROFILE requests"""


class Config(Section):
    """Config of a whole run. `load_config` reads it from YAML and overrides."""

    run: Run = Run()
    model: Model
    data: Data = Data()
    train: Train
    optim: Optim = Optim()
    sharding: Sharding = Sharding()
    precision: Precision = Precision()
    memory: Memory = Memory()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    xla_fsdp1: XlaFsdp1 = XlaFsdp1()

    @model_validator(mode="before")
    @classmethod
    def _replace_removed(cls, values: Any) -> Any:
        return with_successors(values) if isinstance(values, Mapping) else values

    def without_compiler(self) -> "Config":
        """Return the config without torch.compile, scanned layers and the options that need them."""
        memory = self.memory
        if memory.gradient_checkpointing == "budget":
            memory = memory.model_copy(update={"gradient_checkpointing": "none", "budget": Memory().budget})
        if self.compile.scan_layers:  # XLA offloads inputs of scanned layers alone
            memory = memory.model_copy(update={"offload": "none"})
        return self.model_copy(update={"compile": Compile(), "memory": memory})
