"""The config: what a run does, the same on every device. Each field says what it means and its unit.

Where it runs (`--device`, `--backend`, `--num_devices`) is a flag of the launcher and never stands here.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field, field_validator, model_validator

from portable_fsdp.config.data import Data, Section
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import FACTORY_PATTERN

TASKS = "causal_lm|seq2seq_lm|masked_lm|sequence_classification|token_classification|image_classification"
"""Those of transformers."""


class Run(Section):
    dir: str = Field(default="runs/run", description="local folder for everything that the run writes", min_length=1)
    name: str | None = Field(
        default=None,
        description="name of the run in events.jsonl and in checkpoints; printable characters",
        pattern=r"^[^\x00-\x1f\x7f]*$",
    )
    seed: int = Field(default=0, ge=0, description="seed of the initial weights and of the data order")
    # A process may miss heartbeats for a while (it holds Python's lock, its host swaps). A collective's own timeout is
    # no such bound: it must be longer than any save.
    peer_timeout_s: float = Field(
        default=120.0,
        ge=5,
        description="seconds without a heartbeat after which a process counts as lost and all processes end",
    )

    @field_validator("dir")
    @classmethod
    def _local(cls, value: str) -> str:
        """A path would take the URL for a local folder named `s3:`, and the error would come after the first save."""
        if "://" in value:
            raise ValueError(
                f"expected a local folder, found the URL {value!r}: metrics, events and config are written locally.\n"
                "  For checkpoints in a store set checkpoint.dir to the URL, and run.dir to a folder"
            )
        return value


class Lora(Section):
    """Low-rank adapters, by peft."""

    r: int = Field(default=16, ge=1, description="rank of the adapters")
    alpha: float = Field(default=32.0, gt=0, description="scales the adapters' product by alpha / r")
    targets: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="linear layers that get adapters: name patterns or last parts of names (q_proj); all-linear: all "
        "except the head",
        strict=False,
    )
    start_from: str | None = Field(
        default=None,
        description="local folder or hub id of peft adapters to start from, with the same r, alpha and targets; null: "
        "new adapters",
    )


class Model(Section):
    architecture: dict[str, Any] | str | None = Field(
        default=None,
        description="a new model with weights drawn from run.seed: the content of a transformers config.json (at "
        "least `model_type` and the sizes), or the path of such a file or its folder",
    )
    pretrained: str | None = Field(
        default=None,
        description="local folder in Hugging Face format with safetensors weights, or a hub id: org/name, "
        "org/name@revision",
    )
    factory: str | None = Field(
        default=None,
        description="a model of your own: `module:function`, which returns a torch.nn.Module; modules are found in the "
        "config's folder and on PYTHONPATH",
        pattern=FACTORY_PATTERN,
    )
    gguf_file: str | None = Field(
        default=None,
        description="GGUF file in model.pretrained (llama, qwen2, qwen3); the run takes its weights (dequantised), "
        "config and tokenizer",
        min_length=1,
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description="name patterns of tensors that model.pretrained may lack (drawn from run.seed) or have in excess "
        "(left out); `data.tokenizer`: its ids may differ from the model's",
        strict=False,
    )
    attention: Literal["auto", "static", "flex", "sdpa", "eager"] = Field(
        default="auto",
        description="auto: static where the model takes it; static: one function for all engines; flex: torch's "
        "flex_attention, which skips masked blocks (GPUs only); sdpa, eager: transformers' own",
    )
    experts: Literal["auto", "dense", "batched_mm", "grouped_mm"] = Field(
        default="auto",
        description="implementation of a mixture of experts; dense (auto): every expert on every token, weighted; "
        "batched_mm: a copy of the chosen weights per token; both static shapes; grouped_mm: tokens sorted by expert",
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        description="name patterns of parameters or modules that don't train: no gradient, no optimizer state; `*` "
        "matches any text",
        strict=False,
    )
    lora: Lora | None = Field(
        default=None,
        description="train low-rank adapters (LoRA) only; `{}`: with the defaults of its keys; null: no adapters",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if sum(source is not None for source in (self.architecture, self.pretrained, self.factory)) != 1:
            raise ValueError("give exactly one of model.architecture, model.pretrained and model.factory")
        if isinstance(self.architecture, dict) and not isinstance(self.architecture.get("model_type"), str):
            raise ValueError("model.architecture needs a `model_type` (llama, qwen3, gpt2, ...)")
        for key in ("gguf_file", "allow"):
            if self.pretrained is None and getattr(self, key):
                raise ValueError(f"model.{key} goes with model.pretrained")
        return self


class Train(Section):
    task: str = Field(
        default="causal_lm",
        description="how a batch becomes a loss: causal_lm, seq2seq_lm, masked_lm, sequence_classification, "
        "token_classification, image_classification; or `module:function`, called with the model and the batch, which "
        "returns the sum of the losses and their count",
        pattern=f"^({TASKS})$|{FACTORY_PATTERN}",
    )
    steps: int | None = Field(default=None, ge=1, description="optimizer updates in the whole run")
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="passes over the data, instead of train.steps; a pass over a mixture has as many rows as all its "
        "sources",
    )
    global_batch: int = Field(default=8, ge=1, description="sequences per step, over all devices and micro batches")
    micro_batch: Annotated[int, Ge(1)] | Literal["auto"] = Field(
        default=1,
        description="sequences per device in one forward and backward pass; auto: the largest that fits, by a plan",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="global gradient norm to clip to; null: no clipping"
    )
    log_every: int = Field(default=10, ge=1, description="steps between console lines")
    eval_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between evaluations on data.eval_split; the last step is always evaluated; null: never",
    )
    eval_on_start: bool = Field(default=False, description="evaluate before the first step too, as a baseline")
    eval_batches: int | None = Field(
        default=None,
        ge=1,
        description="evaluate at most this many batches of train.global_batch sequences, spread evenly over the rows; "
        "null: all rows",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="stop after this many evaluations without improvement; null: never",
    )
    stop_at: int | None = Field(
        default=None, ge=1, description="stop at this step; the schedule still spans train.steps"
    )
    sample_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between texts that the model writes after train.sample_prompts, and after the last step; "
        "null: never",
    )
    sample_prompts: tuple[str, ...] = Field(
        default=(), description="beginnings of texts, which the model continues", strict=False
    )
    sample_tokens: int = Field(default=64, ge=1, description="tokens after each prompt, at most")

    @property
    def resolved_micro_batch(self) -> int:
        """`micro_batch`, once it is a number. Raises ConfigError for `auto`, which `train.loop.train` resolves."""
        if self.micro_batch == "auto":
            raise ConfigError("train.micro_batch: expected a number, found auto.\n  plan --largest-batch prints one.")
        return self.micro_batch

    @model_validator(mode="after")
    def _one_length(self) -> "Train":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs")
        return self


class OptimGroup(Section):
    match: str = Field(description="name pattern of parameters or modules", min_length=1)
    lr: float | None = Field(default=None, gt=0, description="peak learning rate of the group; null: optim.lr")
    weight_decay: float | None = Field(
        default=None, ge=0, description="weight decay of all its tensors; null: as without the group"
    )


DecayRate = Annotated[float, Ge(0), Lt(1)]


class Optim(Section):
    name: Literal["adamw", "adam", "sgd", "adafactor", "lion", "muon", "adamw8bit"] = Field(
        default="adamw",
        description="optimizer; muon: hidden matrices by Muon, the rest by AdamW; adamw8bit: moments in 8 bits, by "
        "bitsandbytes",
    )
    factory: str | None = Field(
        default=None,
        description="your own optimizer, as module:function (docs/optimizers.md)",
        pattern=FACTORY_PATTERN,
    )
    lr: float = Field(default=3e-4, gt=0, description="peak learning rate")
    betas: tuple[DecayRate, DecayRate] = Field(
        default=(0.9, 0.95), description="decay rates of both moments of AdamW and Adam; Lion's betas", strict=False
    )
    eps: float = Field(default=1e-8, gt=0, description="epsilon of AdamW and Adam")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum of SGD and Muon")
    weight_decay: float = Field(
        default=0.1, ge=0, description="weight decay of matrices, decoupled; adam: added to the gradient"
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="learning rate after warmup; wsd: warmup, stable, decay"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warmup")
    min_lr_ratio: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="floor of the schedule, as a share of lr; not 0, which would make XLA recompile",
    )
    decay_ratio: float = Field(default=0.2, gt=0, le=1, description="share of train.steps that wsd spends in decay")
    groups: tuple[OptimGroup, ...] = Field(
        default=(),
        description="parameters with their own lr or weight decay; the first match counts",
        strict=False,
    )


class Sharding(Section):
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"] = Field(
        default="FULL_SHARD",
        description="FULL_SHARD: parameters, gradients and optimizer state (ZeRO-3); SHARD_GRAD_OP: gathered "
        "parameters stay until backward (ZeRO-2); NO_SHARD: as DDP; HYBRID_SHARD, HYBRID_SHARD_ZERO2: ZeRO-3 or ZeRO-2 "
        "inside a replica, copies across replicas",
    )
    replicas: int | None = Field(
        default=None, ge=1, description="copies of the model under HYBRID_SHARD*; null: one per host"
    )
    reshard_after_forward: int | None = Field(
        default=None,
        ge=2,
        description="reshard parameters after forward over this many devices only, between FULL_SHARD and "
        "SHARD_GRAD_OP; null: as the strategy does",
    )
    wrap: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = Field(
        default="TRANSFORMER_BASED_WRAP",
        description="FSDP units, gathered and freed together: the model's layers; modules of min_num_params; only the "
        "whole model",
    )
    wrap_classes: tuple[str, ...] = Field(
        default=(),
        description="module classes to use as layers instead of the model's own: recomputed, compiled, and units under "
        "TRANSFORMER_BASED_WRAP",
        strict=False,
    )
    wrap_modules: tuple[str, ...] = Field(
        default=(), description="name patterns of further modules that become units", strict=False
    )
    min_num_params: int | None = Field(
        default=None, ge=1, description="smallest number of parameters of a unit under SIZE_BASED_WRAP"
    )
    forward_prefetch: int = Field(
        default=0, ge=0, description="units to gather ahead in forward; 0: the engine's default"
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = Field(
        default="BACKWARD_PRE",
        description="gather the next units in backward before the current unit's gradients, after them, or on demand",
    )
    backward_prefetch_units: int = Field(default=1, ge=1, description="units to gather ahead in backward")
    sync_each_micro_batch: bool = Field(
        default=True,
        description="sum gradients over shards after each micro batch; false: once a step, and whole gradients stay in "
        "memory until then",
    )

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


DType = Literal["float32", "bfloat16", "float16"]


LEAST_LOSS_SCALE = 1
"""A run ends whose gradients overflow at this scale: DeepSpeed's min_loss_scale."""
LARGEST_LOSS_SCALE = 2.0**127  # twice as much is infinite in float32


class Precision(Section):
    master: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of weights and optimizer state at rest"
    )
    frozen: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype at rest of weights that don't train (model.freeze, the base of model.lora); auto: master",
    )
    compute: DType = Field(default="float32", description="dtype of forward and backward")
    reduce: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype of the gradient sum over devices; auto: float32 where the engine can",
    )
    output: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="dtype of the logits that enter the loss; auto: the head's"
    )
    buffers: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="dtype of floating-point buffers, as rotary frequencies and running means; auto: the model's own",
    )
    cast_inputs: bool = Field(
        default=True,
        description="cast what the model and its units take to their compute dtype; false: they take it as it comes",
    )
    modules: dict[str, DType] = Field(
        default={},
        description="name pattern of modules -> compute dtype, as norms, a router or the head in float32; the first "
        "match counts",
    )
    products: Literal["auto", "float8", "float8_rowwise", "int8"] = Field(
        default="auto",
        description="products of the layers' linear layers; auto: in the compute dtype; float8: one scale a tensor, "
        "float8_rowwise: one a row (GPUs); int8: TPU v5e and v5p",
    )
    matmul: Literal["highest", "high", "default"] = Field(
        default="highest",
        description="precision of float32 matrix products; highest: float32; high: TF32 on GPUs, three bfloat16 passes "
        "on TPUs; default: the device's fastest",
    )
    loss_scale: float = Field(
        default=65536.0,
        ge=LEAST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
        description="float16: first multiple of the loss that backward starts from; halved when gradients overflow",
    )
    loss_scale_window: int = Field(
        default=2000, ge=1, description="float16: steps without overflow after which the loss scale is doubled"
    )

    @property
    def dtypes(self) -> set[str]:
        """The dtypes that weights are cast to at use."""
        return {self.compute, *self.modules.values()}


class Memory(Section):
    gradient_checkpointing: Literal["none", "full", "selective", "budget"] = Field(
        default="none",
        description="recompute activations in backward; full: every layer; selective: every memory.every-th layer, or "
        "all outputs except those of memory.save_ops; budget: what compiled layers keep above memory.budget",
    )
    budget: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="budget: share of a compiled layer's activations that it may keep; torch.compile's partitioner "
        "recomputes the rest, the cheapest first",
    )
    every: int | None = Field(
        default=None, ge=1, description="selective: recompute every n-th layer, starting with the first"
    )
    save_ops: tuple[Literal["matmul", "attention"], ...] = Field(
        default=(), description="selective: operations whose outputs every layer keeps", strict=False
    )
    classes: tuple[str, ...] = Field(
        default=(),
        description="classes of modules to recompute in place of the layers: parts of a layer, or what holds several",
        strict=False,
    )
    offload: Literal["none", "activations"] = Field(
        default="none",
        description="activations: inputs of recomputed layers wait for backward in host memory",
    )
    cpu_offload: bool = Field(
        default=False, description="keep parameters, gradients and optimizer state in host memory"
    )


class Compile(Section):
    enabled: bool = Field(default=False, description="torch.compile each layer; XLA always compiles")
    backend: Literal["auto", "inductor", "aot_eager", "eager"] = Field(
        default="auto",
        description="torch.compile's backend; auto: inductor on cuda, TorchTPU's own on tpu; inductor needs a GPU here",
    )
    cache_dir: str | None = Field(
        default=None,
        description="folder of inductor's compiled kernels, for later starts; null: TORCHINDUCTOR_CACHE_DIR, or "
        "portable_fsdp in the user's cache folder",
    )
    scan_layers: bool = Field(
        default=False, description="XLA: compile one layer and loop over it, instead of one copy per layer"
    )

    @property
    def compiler(self) -> str | None:
        """`backend`; None where nothing is compiled by it."""
        return self.backend if self.enabled else None


class Checkpoint(Section):
    dir: str | None = Field(
        default=None,
        description="folder that all processes share, or object store (s3://, gs://); null: run.dir/checkpoints",
    )
    every: int | None = Field(default=None, ge=1, description="steps between saves; the last step is always saved")
    every_minutes: float | None = Field(
        default=None, gt=0, description="minutes between saves, by the clock of process 0"
    )
    async_save: bool = Field(
        default=False, description="save in the background: a step waits only for a copy to host memory"
    )
    keep: int | None = Field(default=None, ge=1, description="newest checkpoints to keep; null: all")
    keep_every: int | None = Field(default=None, ge=1, description="with keep: also keep every n-th step")
    resume: str = Field(
        default="auto", description="auto: the run's newest complete checkpoint; none; or a checkpoint's path or URL"
    )
    load: Literal["all", "weights_only"] = Field(
        default="all", description="weights_only: start a new run from the weights of the checkpoint that resume names"
    )
    allow: tuple[str, ...] = Field(
        default=(),
        description="settings of the loss curve that may differ from the checkpoint's: optim.lr, data, train.steps, "
        "...; replicas: save although replicas of the weights differ",
        strict=False,
    )
    verify: Literal["full", "size", "off"] = Field(
        default="full", description="check before loading: the hash of every file, their sizes, or only the manifest"
    )
    export: bool = Field(
        default=False,
        description="write a Hugging Face folder to run.dir/export at the end; with model.lora: peft adapters",
    )
    merge_adapters: bool = Field(
        default=False, description="with model.lora: export the whole model with the adapters merged"
    )

    @field_validator("dir")
    @classmethod
    def _outlives_the_run(cls, value: str | None) -> str | None:
        if value is not None and "memory://" in value.lower():  # also behind a cache: simplecache::memory://
            raise ValueError(
                f"expected a folder or an object store, found {value!r}: memory:// ends with its process.\n"
                "  Set a folder that all processes share, an s3:// or gs:// URL, or null for run.dir/checkpoints"
            )
        return value


class XlaFsdp1(Section):
    """Options of the engine xla_fsdp1 only; the other sections hold its other settings."""

    flatten_parameters: bool = Field(
        default=False, description="join a unit's parameters into one tensor, gathered and reduced at once"
    )
    shard_param_on_dim_0: bool | None = Field(
        default=None,
        description="shard each parameter by rows; false: flat, padded to 128 elements per device; null: by rows "
        "unless flatten_parameters",
    )
    pin_layout_in_collective_ops: bool | None = Field(
        default=None, description="fix the memory layout of collectives' inputs and outputs; null: on TPUs"
    )
    buffer_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the model's floating-point buffers (rotary frequencies)"
    )


Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


class Profile(Section):
    """A profile of some steps."""

    steps: tuple[int, int] = Field(description="the first and the last step to profile", strict=False)

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"expected the first and the last step, as [20, 23], found {list(steps)}")
        if steps[1] - steps[0] >= 20:
            reason = "the run waits while each step's tens of thousands of events are written"
            raise ValueError(f"expected at most 20 steps, found {list(steps)}: {reason}")
        return steps


class Observe(Section):
    trackers: tuple[Tracker, ...] = Field(
        default=(), description="experiment trackers that get the metrics, by accelerate's classes", strict=False
    )
    profile: Profile | None = Field(
        default=None,
        description="steps whose trace and summary go to run.dir/profile; null: none, but for those that a file "
        "PROFILE asks for",
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
    observe: Observe = Observe()
    xla_fsdp1: XlaFsdp1 = XlaFsdp1()

    def without_compiler(self) -> "Config":
        """The same steps without torch.compile and scan, and so without what needs them: every layer runs by itself."""
        memory = self.memory
        if memory.gradient_checkpointing == "budget":
            memory = memory.model_copy(update={"gradient_checkpointing": "none", "budget": Memory().budget})
        if self.compile.scan_layers:  # XLA offloads inputs of scanned layers alone
            memory = memory.model_copy(update={"offload": "none"})
        return self.model_copy(update={"compile": Compile(), "memory": memory})
