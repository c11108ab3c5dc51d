"""The config: what a run does, the same on every device. Each field says what it means and its unit.

Where it runs (`--device`, `--backend`, `--num_devices`) is a flag of the launcher and never stands here.
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from portable_fsdp.config.data import Data
from portable_fsdp.config.section import DecayRate, Float, Section


class Run(Section):
    dir: str = Field(
        default="runs/run", description="local folder that everything this run writes goes to", min_length=1
    )
    name: str | None = Field(
        default=None,
        description="a name for people, in events.jsonl and in checkpoints; of characters that print",
        pattern=r"^[^\x00-\x1f\x7f]*$",
    )
    seed: int = Field(default=0, ge=0, description="seeds the initial weights and the data order")
    # One bound for every process, whatever it waits in. Long enough for what a process may do without a word (holding
    # Python's lock, a host that swaps); a collective's own timeout must be longer than any save, and is no such bound.
    peer_timeout_s: Float = Field(
        default=120.0,
        ge=5,
        description="seconds without a sign of life after which a process counts as lost, and all end",
    )

    @field_validator("dir")
    @classmethod
    def _local(cls, value: str) -> str:
        """As a path an URL would name a folder here, `s3:`, and nobody would miss the store before it is needed."""
        if "://" in value:
            raise ValueError(
                f"expected a local folder, found the URL {value!r}: metrics, events and config are written locally.\n"
                "  For checkpoints in a store set checkpoint.dir to the URL, and run.dir to a folder"
            )
        return value


class Lora(Section):
    """Low-rank adapters, by peft."""

    r: int = Field(default=16, ge=1, description="rank of the adapters")
    alpha: Float = Field(default=32.0, gt=0, description="the adapters' product counts alpha / r times")
    targets: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="linear layers that get adapters: name patterns, or the ends of names (q_proj); all-linear: all "
        "but the head",
        strict=False,
    )
    start_from: str | None = Field(
        default=None,
        description="a local folder or hub id with adapters in peft's format, the initial values; r, alpha and targets "
        "must be theirs; null: new ones",
    )


class Model(Section):
    architecture: dict[str, Any] | str | None = Field(
        default=None,
        description="a new model, its weights drawn from run.seed: what a config.json of transformers holds, "
        "`model_type` and the sizes at least; or the path of such a file, or of a folder with one",
    )
    pretrained: str | None = Field(
        default=None,
        description="a local folder in Hugging Face format with safetensors weights, or a model of the hub: org/name, "
        "org/name@revision",
    )
    gguf_file: str | None = Field(
        default=None,
        description="a GGUF file in model.pretrained (llama, qwen2, qwen3), whose weights, config and tokenizer are "
        "taken, dequantised",
        min_length=1,
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description="name patterns of tensors that model.pretrained may lack (they are drawn from run.seed) or have "
        "beyond the model's (they are left out); `data.tokenizer`, where its ids may name other tokens than the "
        "model's",
        strict=False,
    )
    attention: Literal["auto", "static", "flex", "sdpa", "eager"] = Field(
        default="auto",
        description="attention implementation; auto: static (one function for all engines) where the model takes it; "
        "flex: torch's flex_attention, which computes no block of scores that is masked (GPUs alone); sdpa, eager: "
        "transformers' own",
    )
    experts: Literal["auto", "dense", "batched_mm", "grouped_mm"] = Field(
        default="auto",
        description="experts implementation of a mixture of experts; dense: every expert on every token, weighted, in "
        "static shapes; batched_mm: a copy of the chosen weights per token, static too; grouped_mm: sorted by expert; "
        "auto: dense",
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        description="name patterns of parameters (or of modules that hold them) that don't train: no gradient, no "
        "optimizer state; `*` stands for any text",
        strict=False,
    )
    lora: Lora | None = Field(
        default=None,
        description="train low-rank adapters (LoRA) and nothing else; `{}` for the defaults of its keys; null: no "
        "adapters",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if (self.architecture is None) == (self.pretrained is None):
            raise ValueError("give exactly one of model.architecture and model.pretrained")
        if isinstance(self.architecture, dict) and not isinstance(self.architecture.get("model_type"), str):
            raise ValueError("model.architecture needs a `model_type` (llama, qwen3, gpt2, ...)")
        for key in ("gguf_file", "allow"):
            if self.pretrained is None and getattr(self, key):
                raise ValueError(f"model.{key} goes with model.pretrained")
        return self


class Train(Section):
    steps: int | None = Field(default=None, ge=1, description="optimizer updates in the whole run")
    epochs: Float | None = Field(
        default=None,
        gt=0,
        description="passes over the data, instead of train.steps; of a mixture: as many rows as its parts have "
        "together, drawn by their weights",
    )
    global_batch: int = Field(default=8, ge=1, description="sequences in a step, over all devices and micro batches")
    micro_batch: int = Field(default=1, ge=1, description="sequences per device in one forward and backward")
    max_grad_norm: Float | None = Field(
        default=1.0, gt=0, description="global gradient norm to clip to; null: no clipping"
    )
    log_every: int = Field(default=10, ge=1, description="steps between two console lines")
    eval_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between two evaluations over the rows of data.eval_split, and one at the last step; null: "
        "none",
    )
    eval_on_start: bool = Field(
        default=False, description="evaluate before the first step too, which tells what training is worth"
    )
    eval_batches: int | None = Field(
        default=None,
        ge=1,
        description="evaluate over at most so many batches of train.global_batch sequences, evenly spread over the "
        "rows; null: all rows",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="evaluations without a lower loss than the best so far, after which the run ends; null: it goes on",
    )
    stop_at: int | None = Field(
        default=None, ge=1, description="end at this step; the schedule still spans train.steps"
    )

    @model_validator(mode="after")
    def _one_length(self) -> "Train":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        return self


class OptimGroup(Section):
    match: str = Field(description="name pattern of parameters, or of modules that hold them", min_length=1)
    lr: Float | None = Field(default=None, gt=0, description="peak learning rate of the group; null: optim.lr")
    weight_decay: Float | None = Field(default=None, ge=0, description="of all its tensors; null: as without the group")


class Optim(Section):
    name: Literal["adamw", "sgd"] = Field(default="adamw", description="optimizer")
    lr: Float = Field(default=3e-4, gt=0, description="peak learning rate")
    betas: tuple[DecayRate, DecayRate] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the two moments", strict=False
    )
    eps: Float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    momentum: Float = Field(default=0.0, ge=0, lt=1, description="SGD's momentum")
    weight_decay: Float = Field(default=0.1, ge=0, description="decoupled weight decay, on matrices only")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="learning rate after warmup; wsd: warmup, stable, decay"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warmup")
    min_lr_ratio: Float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="floor of the schedule, as a share of lr; above 0, where XLA would recompile",
    )
    decay_ratio: Float = Field(default=0.2, gt=0, le=1, description="share of train.steps in which wsd decays")
    groups: tuple[OptimGroup, ...] = Field(
        default=(),
        description="parameters with an lr or weight decay of their own; the first that matches counts",
        strict=False,
    )


class Sharding(Section):
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"] = Field(
        default="FULL_SHARD",
        description="FULL_SHARD: parameters, gradients and optimizer state (ZeRO-3); SHARD_GRAD_OP: gathered "
        "parameters stay until backward (ZeRO-2); NO_SHARD: as DDP; HYBRID_SHARD, HYBRID_SHARD_ZERO2: the first or the "
        "second within a replica, copies across replicas",
    )
    replicas: int | None = Field(
        default=None, ge=1, description="copies of the model under HYBRID_SHARD*; null: one a host"
    )
    reshard_after_forward: int | None = Field(
        default=None,
        ge=2,
        description="after forward keep parameters sharded over this many devices only, as a middle way between "
        "FULL_SHARD and SHARD_GRAD_OP; null: as the strategy says",
    )
    wrap: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = Field(
        default="TRANSFORMER_BASED_WRAP",
        description="what is a unit, gathered and freed together: the model's layers; modules of min_num_params; "
        "nothing but the whole model",
    )
    wrap_classes: tuple[str, ...] = Field(
        default=(),
        description="module classes that are the layers instead of the model's own: recomputed, compiled, and units "
        "under TRANSFORMER_BASED_WRAP",
        strict=False,
    )
    wrap_modules: tuple[str, ...] = Field(
        default=(), description="name patterns of further modules that are units of their own", strict=False
    )
    min_num_params: int | None = Field(
        default=None, ge=1, description="parameters that a module needs to be a unit under SIZE_BASED_WRAP"
    )
    forward_prefetch: int = Field(
        default=0, ge=0, description="units that are gathered ahead in forward; 0: as the engine does by itself"
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = Field(
        default="BACKWARD_PRE",
        description="when the next units are gathered in backward: before the current one's gradients, after them, or "
        "when they are needed",
    )
    backward_prefetch_units: int = Field(default=1, ge=1, description="units that are gathered ahead in backward")


DType = Literal["float32", "bfloat16", "float16"]


class Precision(Section):
    master: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype in which weights and optimizer state rest"
    )
    frozen: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype in which weights that don't train rest (model.freeze, the base of model.lora); auto: as "
        "master",
    )
    compute: DType = Field(default="float32", description="dtype of forward and backward")
    reduce: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype in which gradients are summed over devices; auto: float32 where the engine can",
    )
    output: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="dtype of the logits that the loss takes; auto: as the head gives them"
    )
    modules: dict[str, DType] = Field(
        default={},
        description="name pattern of modules -> their compute dtype: norms, a router, the head in float32; the first "
        "that matches counts",
    )
    matmul: Literal["highest", "high", "default"] = Field(
        default="highest",
        description="what a float32 matrix product may be made of; highest: float32; high: TF32 on GPUs, three "
        "bfloat16 passes on TPUs; default: the device's fastest",
    )


class Memory(Section):
    gradient_checkpointing: Literal["none", "full", "selective"] = Field(
        default="none",
        description="recompute activations in backward; full: of every layer; selective: of every memory.every-th, or "
        "all but the outputs of memory.save_ops",
    )
    every: int | None = Field(
        default=None, ge=1, description="selective: every n-th layer is recomputed, from the first on"
    )
    save_ops: tuple[Literal["matmul", "attention"], ...] = Field(
        default=(), description="selective: classes of operations whose outputs are kept in every layer", strict=False
    )
    cpu_offload: bool = Field(
        default=False, description="parameters, gradients and optimizer state rest in host memory"
    )


class Compile(Section):
    enabled: bool = Field(default=False, description="torch.compile of each layer; XLA compiles in any case")
    backend: Literal["inductor", "aot_eager", "eager"] = Field(
        default="inductor", description="torch.compile's backend; inductor needs a GPU here"
    )
    scan_layers: bool = Field(
        default=False, description="XLA: one program for all layers, looped, instead of a copy for each"
    )


class Checkpoint(Section):
    dir: str | None = Field(
        default=None,
        description="where checkpoints lie: a folder that all processes share, or an object store (s3://, gs://); "
        "null: run.dir/checkpoints",
    )
    every: int | None = Field(default=None, ge=1, description="steps between two saves; the last step is always saved")
    every_minutes: float | None = Field(
        default=None, gt=0, description="minutes between two saves, by the clock of process 0"
    )
    async_save: bool = Field(
        default=False, description="save in the background: a step waits for a copy to host memory only"
    )
    keep: int | None = Field(default=None, ge=1, description="newest checkpoints to keep; null: all")
    keep_every: int | None = Field(default=None, ge=1, description="with keep: keep those of every n-th step as well")
    resume: str = Field(
        default="auto", description="auto: the newest whole checkpoint of the run; none; or a checkpoint's path or URL"
    )
    load: Literal["all", "weights_only"] = Field(
        default="all", description="weights_only: a new run from the weights of the checkpoint that resume names"
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description="settings that make the loss curve and may differ from those of the run that saved: "
        "optim.lr, data, train.steps, ...; replicas: save although replicas of the weights differ",
        strict=False,
    )
    verify: Literal["full", "size", "off"] = Field(
        default="full", description="check before a load: the hash of every file, their lengths, or the manifest only"
    )
    export: bool = Field(
        default=False,
        description="write a Hugging Face folder to run.dir/export at the end; with model.lora the adapters, in peft's "
        "format",
    )
    merge_adapters: bool = Field(
        default=False, description="with model.lora: export the whole model, the adapters added in"
    )

    @field_validator("dir")
    @classmethod
    def _outlives_the_run(cls, value: str | None) -> str | None:
        if value is not None and "memory://" in value.lower():  # also behind a cache: simplecache::memory://
            raise ValueError(
                f"expected a folder or an object store, found {value!r}: fsspec's memory:// is the memory of one "
                "process and ends with it.\n  Set a folder that all processes share, an s3:// or gs:// URL, or null "
                "for run.dir/checkpoints"
            )
        return value


class XlaFsdp1(Section):
    """What only the engine xla_fsdp1 has; the rest of its settings are said by the other sections."""

    flatten_parameters: bool = Field(
        default=False, description="join the parameters of a unit into one tensor, gathered and reduced at once"
    )
    shard_param_on_dim_0: bool | None = Field(
        default=None,
        description="cut each parameter by its rows; false: flat, padded to 128 elements a device; "
        "null: by rows, but for flatten_parameters",
    )
    pin_layout_in_collective_ops: bool | None = Field(
        default=None, description="fix the memory layout of what collectives take and give; null: on TPUs"
    )
    buffer_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the model's floating buffers (a rotary embedding's frequencies)"
    )


class Config(Section):
    """A whole run. `load_config` reads it from YAML and overrides."""

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
    xla_fsdp1: XlaFsdp1 = XlaFsdp1()
