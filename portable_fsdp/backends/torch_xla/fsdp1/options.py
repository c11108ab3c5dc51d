"""What xla_fsdp1 (XlaFullyShardedDataParallel) refuses. No torch here."""

from portable_fsdp.backends.refusals import Rule, only_largest_bucket, refused, refused_each
from portable_fsdp.backends.torch_xla.options import torch_xla_spec

_FLOAT32_ONLY = "XlaFullyShardedDataParallel takes float32 weights only"

RULES = (
    *refused(
        "precision.master on xla_fsdp1",
        _FLOAT32_ONLY,
        "--backend=xla",
        when=lambda c, p: c.precision.compute != "float32",
    ),
    *refused(
        "precision.frozen=bfloat16 on xla_fsdp1",
        _FLOAT32_ONLY,
        "--backend=xla",
        when=lambda c, p: bool(c.model.freeze or c.model.lora),
    ),
    *refused_each(
        "on xla_fsdp1",
        {
            "precision.cast_inputs": "XlaFullyShardedDataParallel casts what each unit takes",
            "precision.modules": "XlaFullyShardedDataParallel casts a whole unit to one compute dtype",
            "precision.products=int8": "its layers multiply as torch's do",
            "precision.buffers": "xla_fsdp1.buffer_dtype sets it there",
            "optim.name=adafactor|muon": "it takes whole matrices, and a device has flat parts of them",
            "optim.factory": "an optimizer may take whole matrices, and a device has flat parts of them",
            "memory.offload": "torch_xla's checkpoint keeps what it recomputes from in device memory",
            "compile.scan_layers": "a unit's weights are gathered by its own module, one layer after the other",
            "train.micro_batch=auto": "it has no planner",
        },
        "--backend=xla",
    ),
    Rule(
        "memory.save_ops on xla_fsdp1",
        "torch_xla's checkpoint recomputes all of a layer",
        lambda c, p: bool(c.memory.save_ops),
        ("memory.save_ops=[] and memory.gradient_checkpointing=full and memory.every=null", "--backend=xla"),
        takes_default_alone=True,
    ),
    Rule(
        "data.buckets of several sizes on several devices",
        "each device has a process, which reads other rows and would choose another program than the rest",
        lambda c, p: c.data.shapes > 1 and (p.devices or 1) > 1,
        only_largest_bucket,
    ),
    *refused(
        "xla_fsdp1.flatten_parameters with weight decay or optimizer groups",
        "a unit's parameters are one tensor, which has one weight decay and one learning rate",
        "optim.weight_decay=0 and optim.groups=[]",
        when=lambda c, p: bool(c.optim.weight_decay or c.optim.groups),
    ),
    Rule(
        "xla_fsdp1.shard_param_on_dim_0 with flatten_parameters",
        "the joined parameters of a unit have no rows; torch_xla would ignore it",
        lambda c, p: c.xla_fsdp1.flatten_parameters and bool(c.xla_fsdp1.shard_param_on_dim_0),
        ("xla_fsdp1.shard_param_on_dim_0=null", "xla_fsdp1.flatten_parameters=false"),
    ),
    Rule(
        "xla_fsdp1.shard_param_on_dim_0 for a model with a parameter of no dimensions",
        "it has no rows to cut; false cuts each parameter flat",
    ),
)

SPEC = torch_xla_spec(
    "portable_fsdp.backends.torch_xla.fsdp1.engine:XlaFsdp1Backend",
    rules=RULES,
    # One a chip. PJRT's CPU devices can't talk across processes.
    processes=lambda device, requested, count: count(device) if device == "tpu" else 1,
)
