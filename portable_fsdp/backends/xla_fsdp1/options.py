"""What xla_fsdp1 (XlaFullyShardedDataParallel) does with each option. No torch here."""

from portable_fsdp.backends import pjrt_options
from portable_fsdp.backends.options import EngineOptions
from portable_fsdp.config.rules import Effect, Rule

RULES = (
    Rule(
        "precision.master",
        "on xla_fsdp1",
        lambda c, p: c.precision.master == "bfloat16" and c.precision.compute != "float32",
        "XlaFullyShardedDataParallel takes float32 weights only",
        ("precision.master=float32", "--backend=xla"),
    ),
    Rule(
        "precision.frozen",
        "on xla_fsdp1",
        lambda c, p: c.precision.frozen == "bfloat16" and bool(c.model.freeze or c.model.lora),
        "XlaFullyShardedDataParallel takes float32 weights only",
        ("precision.frozen=auto", "--backend=xla"),
    ),
    Rule(
        "precision.modules",
        "on xla_fsdp1",
        lambda c, p: bool(c.precision.modules),
        "XlaFullyShardedDataParallel casts a whole unit to one compute dtype",
        ("precision.modules={}", "--backend=xla"),
    ),
    Rule(
        "compile.scan_layers",
        "on xla_fsdp1",
        lambda c, p: c.compile.scan_layers,
        "a unit's weights are gathered by its own module, one layer after the other",
        ("compile.scan_layers=false", "--backend=xla"),
    ),
    Rule(
        "xla_fsdp1.flatten_parameters",
        "with weight decay or optimizer groups",
        lambda c, p: c.xla_fsdp1.flatten_parameters and bool(c.optim.weight_decay or c.optim.groups),
        "a unit's parameters are one tensor, which has one weight decay and one learning rate",
        ("xla_fsdp1.flatten_parameters=false", "optim.weight_decay=0 and optim.groups=[]"),
    ),
    Rule(
        "xla_fsdp1.shard_param_on_dim_0",
        "with flatten_parameters",
        lambda c, p: c.xla_fsdp1.flatten_parameters and bool(c.xla_fsdp1.shard_param_on_dim_0),
        "the joined parameters of a unit have no rows; torch_xla would ignore it",
        ("xla_fsdp1.shard_param_on_dim_0=null", "xla_fsdp1.flatten_parameters=false"),
    ),
    Rule(
        "xla_fsdp1.shard_param_on_dim_0",
        "for a model with a parameter of no dimensions",
        None,
        "it has no rows to cut; false cuts each parameter flat",
    ),
)

EFFECTS = (
    Effect(("sharding.strategy=FULL_SHARD",), "XlaFullyShardedDataParallel(reshard_after_forward=True)"),
    Effect(("sharding.strategy=SHARD_GRAD_OP",), "XlaFullyShardedDataParallel(reshard_after_forward=False)"),
    Effect(("sharding.strategy=NO_SHARD",), "a copy on each device; gradients are all-reduced"),
    Effect(
        ("sharding.strategy=HYBRID_SHARD", "sharding.strategy=HYBRID_SHARD_ZERO2"),
        "sharding_groups within a replica; gradients are all-reduced across",
    ),
    Effect(
        ("sharding.wrap", "sharding.wrap_modules", "sharding.min_num_params"),
        "each unit is an XlaFullyShardedDataParallel, inner ones first, the whole model last",
    ),
    Effect(("precision.compute",), "XlaFullyShardedDataParallel(compute_dtype)"),
    Effect(("precision.reduce",), "gradients are cast to it before the reduce-scatter"),
    Effect(("precision.reduce=auto",), "float32"),
    Effect(("precision.modules={}",), "one compute dtype for all"),
    Effect(("xla_fsdp1.flatten_parameters",), "a unit's parameters are one tensor"),
    Effect(("xla_fsdp1.shard_param_on_dim_0",), "true: each parameter is cut by rows; false: flat"),
    Effect(("xla_fsdp1.shard_param_on_dim_0=null",), "by rows, but for flatten_parameters"),
    Effect(("xla_fsdp1.pin_layout_in_collective_ops",), "layouts of collectives are fixed; null: on TPUs"),
    Effect(("xla_fsdp1.buffer_dtype",), "dtype of floating buffers"),
)

OPTIONS = EngineOptions(
    name="xla_fsdp1",
    engine="portable_fsdp.backends.xla_fsdp1.engine:XlaFsdp1Backend",
    packages=pjrt_options.PACKAGES,
    made_for=(),
    example_device="tpu",
    rules=(*pjrt_options.RULES, *RULES),
    effects=(*pjrt_options.EFFECTS, *EFFECTS),
    # One a chip. PJRT's CPU devices can't talk across processes.
    processes=lambda device, wanted, count: count(device) if device == "tpu" else 1,
    launcher_counts_devices=False,
    section="xla_fsdp1",
    other_devices=pjrt_options.NO_CUDA,
)
