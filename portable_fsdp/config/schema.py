"""The config: what a run does, the same on every device. Each field says what it means and its unit.

Where it runs (`--device`, `--backend`, `--num_devices`) is a flag of the launcher and never stands here.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field, field_validator, model_validator

from portable_fsdp.config.data import PERCENT, Data, Section
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import FACTORY_PATTERN

TASKS = "causal_lm|seq2seq_lm|masked_lm|sequence_classification|token_classification|image_classification"
"""Those of transformers."""


class Run(Section):
    dir: str = Field(default="runs/run", min_length=1)
    """local folder for everything that the run writes"""
    name: str | None = Field(default=None, pattern=r"^[^\x00-\x1f\x7f]*$")
    """name of the run in events.jsonl and in checkpoints; printable characters"""
    seed: int = Field(default=0, ge=0)
    """seed of the initial weights and of the data order"""
    # A process may miss heartbeats for a while (it holds Python's lock, its host swaps). A collective's own timeout is
    # no such bound: it must be longer than any save.
    peer_timeout_s: float = Field(default=120.0, ge=5)
    """seconds without a heartbeat after which a process counts as lost and all processes end"""

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

    r: int = Field(default=16, ge=1)
    """rank of the adapters"""
    alpha: float = Field(default=32.0, gt=0)
    """scales the adapters' product by alpha / r"""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1, strict=False)
    """linear layers that get adapters: name patterns or last parts of names (q_proj); all-linear: all except the
    head"""
    start_from: str | None = None
    """local folder or hub id of peft adapters to start from, with the same r, alpha and targets; null: new
    adapters"""


class Model(Section):
    architecture: dict[str, Any] | str | None = None
    """a new model with weights drawn from run.seed: the content of a transformers config.json (at least
    `model_type` and the sizes), or the path of such a file or its folder"""
    pretrained: str | None = None
    """local folder in Hugging Face format with safetensors weights, or a hub id: org/name, org/name@revision"""
    factory: str | None = Field(default=None, pattern=FACTORY_PATTERN)
    """a model of your own: `module:function`, which returns a torch.nn.Module; modules are found in the config's
    folder and on PYTHONPATH"""
    gguf_file: str | None = Field(default=None, min_length=1)
    """GGUF file in model.pretrained (llama, qwen2, qwen3); the run takes its weights (dequantised), config and
    tokenizer"""
    allow: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of tensors that model.pretrained may lack (drawn from run.seed) or have in excess (left out);
    `data.tokenizer`: its ids may differ from the model's"""
    attention: Literal["auto", "static", "flex", "sdpa", "eager"] = "auto"
    """auto: static where the model takes it; static: one function for all engines; flex: torch's flex_attention,
    which skips masked blocks (GPUs only); sdpa, eager: transformers' own"""
    experts: Literal["auto", "dense", "batched_mm", "grouped_mm"] = "auto"
    """implementation of a mixture of experts; dense (auto): every expert on every token, weighted; batched_mm: a
    copy of the chosen weights per token; both static shapes; grouped_mm: tokens sorted by expert"""
    freeze: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of parameters or modules that don't train: no gradient, no optimizer state; `*` matches any
    text"""
    lora: Lora | None = None
    """train low-rank adapters (LoRA) only; `{}`: with the defaults of its keys; null: no adapters"""

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
    task: str = Field(default="causal_lm", pattern=f"^({TASKS})$|{FACTORY_PATTERN}")
    """how a batch becomes a loss: causal_lm, seq2seq_lm, masked_lm, sequence_classification, token_classification,
    image_classification; or `module:function`, called with the model and the batch, which returns the sum of the
    losses and their count"""
    steps: int | None = Field(default=None, ge=1)
    """optimizer updates in the whole run"""
    epochs: float | None = Field(default=None, gt=0)
    """passes over the data, instead of train.steps; a pass over a mixture has as many rows as all its sources"""
    global_batch: int = Field(default=8, ge=1)
    """sequences per step, over all devices and micro batches"""
    micro_batch: Annotated[int, Ge(1)] | Literal["auto"] = 1
    """sequences per device in one forward and backward pass; auto: the largest that fits, by a plan"""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """global gradient norm to clip to; null: no clipping"""
    log_every: int = Field(default=10, ge=1)
    """steps between console lines"""
    eval_every: int | None = Field(default=None, ge=1)
    """steps between evaluations on data.eval_split; the last step is always evaluated; null: never"""
    eval_on_start: bool = False
    """evaluate before the first step too, as a baseline"""
    eval_batches: int | None = Field(default=None, ge=1)
    """evaluate at most this many batches of train.global_batch sequences, spread evenly over the rows; null: all
    rows"""
    patience: int | None = Field(default=None, ge=1)
    """stop after this many evaluations without improvement; null: never"""
    stop_at: int | None = Field(default=None, ge=1)
    """stop at this step; the schedule still spans train.steps"""
    sample_every: int | None = Field(default=None, ge=1)
    """steps between texts that the model writes after train.sample_prompts, and after the last step; null: never"""
    sample_prompts: tuple[str, ...] = Field(default=(), strict=False)
    """beginnings of texts, which the model continues"""
    sample_tokens: int = Field(default=64, ge=1)
    """tokens after each prompt, at most"""

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
    match: str = Field(min_length=1)
    """name pattern of parameters or modules"""
    lr: float | None = Field(default=None, gt=0)
    """peak learning rate of the group; null: optim.lr"""
    weight_decay: float | None = Field(default=None, ge=0)
    """weight decay of all its tensors; null: as without the group"""


DecayRate = Annotated[float, Ge(0), Lt(1)]


class Optim(Section):
    name: Literal["adamw", "adam", "sgd", "adafactor", "lion", "muon", "adamw8bit"] = "adamw"
    """optimizer; muon: hidden matrices by Muon, the rest by AdamW; adamw8bit: moments in 8 bits, by bitsandbytes"""
    factory: str | None = Field(default=None, pattern=FACTORY_PATTERN)
    """your own optimizer, as module:function (docs/optimizers.md)"""
    lr: float = Field(default=3e-4, gt=0)
    """peak learning rate"""
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.95), strict=False)
    """decay rates of both moments of AdamW and Adam; Lion's betas"""
    eps: float = Field(default=1e-8, gt=0)
    """epsilon of AdamW and Adam"""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """momentum of SGD and Muon"""
    weight_decay: float = Field(default=0.1, ge=0)
    """weight decay of matrices, decoupled; adam: added to the gradient"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """learning rate after warmup; wsd: warmup, stable, decay"""
    warmup_steps: Annotated[int, Ge(0)] | Annotated[str, PERCENT] = 0
    """steps of linear warmup, or their share of all steps (`5%`), rounded up"""
    min_lr_ratio: float = Field(default=0.1, gt=0, le=1)
    """floor of the schedule, as a share of lr; not 0, which would make XLA recompile"""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """share of train.steps that wsd spends in decay"""
    groups: tuple[OptimGroup, ...] = Field(default=(), strict=False)
    """parameters with their own lr or weight decay; the first match counts"""


class Sharding(Section):
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"] = "FULL_SHARD"
    """FULL_SHARD: parameters, gradients and optimizer state (ZeRO-3); SHARD_GRAD_OP: gathered parameters stay until
    backward (ZeRO-2); NO_SHARD: as DDP; HYBRID_SHARD, HYBRID_SHARD_ZERO2: ZeRO-3 or ZeRO-2 inside a replica, copies
    across replicas"""
    replicas: int | None = Field(default=None, ge=1)
    """copies of the model under HYBRID_SHARD*; null: one per host"""
    reshard_after_forward: int | None = Field(default=None, ge=2)
    """reshard parameters after forward over this many devices only, between FULL_SHARD and SHARD_GRAD_OP; null: as
    the strategy does"""
    wrap: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    """FSDP units, gathered and freed together: the model's layers; modules of min_num_params; only the whole
    model"""
    wrap_classes: tuple[str, ...] = Field(default=(), strict=False)
    """module classes to use as layers instead of the model's own: recomputed, compiled, and units under
    TRANSFORMER_BASED_WRAP"""
    wrap_modules: tuple[str, ...] = Field(default=(), strict=False)
    """name patterns of further modules that become units"""
    min_num_params: int | None = Field(default=None, ge=1)
    """smallest number of parameters of a unit under SIZE_BASED_WRAP"""
    forward_prefetch: int = Field(default=0, ge=0)
    """units to gather ahead in forward; 0: the engine's default"""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] = "BACKWARD_PRE"
    """gather the next units in backward before the current unit's gradients, after them, or on demand"""
    backward_prefetch_units: int = Field(default=1, ge=1)
    """units to gather ahead in backward"""
    sync_each_micro_batch: bool = True
    """sum gradients over shards after each micro batch; false: once a step, and whole gradients stay in memory
    until then"""

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


DType = Literal["float32", "bfloat16", "float16"]


LEAST_LOSS_SCALE = 1
"""A run ends whose gradients overflow at this scale: DeepSpeed's min_loss_scale."""
LARGEST_LOSS_SCALE = 2.0**127  # twice as much is infinite in float32


class Precision(Section):
    master: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and optimizer state at rest"""
    frozen: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype at rest of weights that don't train (model.freeze, the base of model.lora); auto: master"""
    compute: DType = "float32"
    """dtype of forward and backward"""
    reduce: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the gradient sum over devices; auto: float32 where the engine can"""
    output: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the logits that enter the loss; auto: the head's"""
    buffers: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of floating-point buffers, as rotary frequencies and running means; auto: the model's own"""
    cast_inputs: bool = True
    """cast floating-point inputs of the model and of each FSDP unit to the compute dtype; false: leave inputs
    unchanged"""
    modules: dict[str, DType] = Field(default={})
    """name pattern of modules -> compute dtype, as norms, a router or the head in float32; the first match
    counts"""
    products: Literal["auto", "float8", "float8_rowwise", "int8"] = "auto"
    """products of the layers' linear layers; auto: in the compute dtype; float8: one scale a tensor,
    float8_rowwise: one a row (GPUs); int8: TPU v5e and v5p"""
    matmul: Literal["highest", "high", "default"] = "highest"
    """precision of float32 matrix products; highest: float32; high: TF32 on GPUs, three bfloat16 passes on TPUs;
    default: the device's fastest"""
    loss_scale: float = Field(default=65536.0, ge=LEAST_LOSS_SCALE, le=LARGEST_LOSS_SCALE)
    """float16: first multiple of the loss that backward starts from; halved when gradients overflow"""
    loss_scale_window: int = Field(default=2000, ge=1)
    """float16: steps without overflow after which the loss scale is doubled"""

    @property
    def dtypes(self) -> set[str]:
        """The dtypes that weights are cast to at use."""
        return {self.compute, *self.modules.values()}


class Memory(Section):
    gradient_checkpointing: Literal["none", "full", "selective", "budget"] = "none"
    """recompute activations in backward; full: every layer; selective: every memory.every-th layer, or all outputs
    except those of memory.save_ops; budget: what compiled layers keep above memory.budget"""
    budget: float = Field(default=0.5, ge=0, le=1)
    """budget: share of a compiled layer's activations that it may keep; torch.compile's partitioner recomputes the
    rest, the cheapest first"""
    every: int | None = Field(default=None, ge=1)
    """selective: recompute every n-th layer, starting with the first"""
    save_ops: tuple[Literal["matmul", "attention"], ...] = Field(default=(), strict=False)
    """selective: operations whose outputs every layer keeps"""
    classes: tuple[str, ...] = Field(default=(), strict=False)
    """classes of modules to recompute in place of the layers: parts of a layer, or what holds several"""
    offload: Literal["none", "activations"] = "none"
    """activations: inputs of recomputed layers wait for backward in host memory"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state in host memory"""


class Compile(Section):
    enabled: bool = False
    """torch.compile each layer; XLA always compiles"""
    backend: Literal["auto", "inductor", "aot_eager", "eager"] = "auto"
    """torch.compile's backend; auto: inductor on cuda, TorchTPU's own on tpu; inductor needs a GPU here"""
    cache_dir: str | None = None
    """folder of inductor's compiled kernels, for later starts; null: TORCHINDUCTOR_CACHE_DIR, or portable_fsdp in
    the user's cache folder"""
    scan_layers: bool = False
    """XLA: compile one layer and loop over it, instead of one copy per layer"""

    @property
    def compiler(self) -> str | None:
        """`backend`; None where nothing is compiled by it."""
        return self.backend if self.enabled else None


class Checkpoint(Section):
    dir: str | None = None
    """folder that all processes share, or object store (s3://, gs://); null: run.dir/checkpoints"""
    every: int | None = Field(default=None, ge=1)
    """steps between saves; the last step is always saved"""
    every_minutes: float | None = Field(default=None, gt=0)
    """minutes between saves, by the clock of process 0"""
    async_save: bool = False
    """save in the background: a step waits only for a copy to host memory"""
    keep: int | None = Field(default=None, ge=1)
    """newest checkpoints to keep; null: all"""
    keep_every: int | None = Field(default=None, ge=1)
    """with keep: also keep every n-th step"""
    resume: str = "auto"
    """auto: the run's newest complete checkpoint; none; or a checkpoint's path or URL"""
    load: Literal["all", "weights_only"] = "all"
    """weights_only: start a new run from the weights of the checkpoint that resume names"""
    allow: tuple[str, ...] = Field(default=(), strict=False)
    """settings of the loss curve that may differ from the checkpoint's: optim.lr, data, train.steps, ...; replicas:
    save although replicas of the weights differ"""
    verify: Literal["full", "size", "off"] = "full"
    """check before loading: the hash of every file, their sizes, or only the manifest"""
    export: bool = False
    """write a Hugging Face folder to run.dir/export at the end; with model.lora: peft adapters"""
    merge_adapters: bool = False
    """with model.lora: export the whole model with the adapters merged"""

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

    flatten_parameters: bool = False
    """join a unit's parameters into one tensor, gathered and reduced at once"""
    shard_param_on_dim_0: bool | None = None
    """shard each parameter by rows; false: flat, padded to 128 elements per device; null: by rows unless
    flatten_parameters"""
    pin_layout_in_collective_ops: bool | None = None
    """fix the memory layout of collectives' inputs and outputs; null: on TPUs"""
    buffer_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the model's floating-point buffers (rotary frequencies)"""


Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


class Profile(Section):
    """A profile of some steps."""

    steps: tuple[int, int] = Field(strict=False)
    """the first and the last step to profile"""

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
    trackers: tuple[Tracker, ...] = Field(default=(), strict=False)
    """experiment trackers that get the metrics, by accelerate's classes"""
    profile: Profile | None = None
    """steps whose trace and summary go to run.dir/profile; null: none, but for those that a file PROFILE asks
    for"""


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
