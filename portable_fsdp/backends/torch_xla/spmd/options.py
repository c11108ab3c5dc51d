"""What xla (torch_xla SPMD) refuses, and the surprises in how it takes the rest. No torch here."""

from portable_fsdp.backends.refusals import (
    Rule,
    is_selective,
    modules_without_float16,
    only_largest_bucket,
    recomputes_modules,
    refused,
)
from portable_fsdp.backends.torch_xla.options import NO_LOSS_SCALING, torch_xla_spec

_ONE_PROGRAM = "all turns of the loop run one program"
_ONE_UNIT = "the loop gathers a layer as one unit"

RULES = (
    Rule(
        "precision.modules with float16 on xla",
        NO_LOSS_SCALING,
        lambda c, p: "float16" in c.precision.modules.values(),
        modules_without_float16,
    ),
    Rule("precision.modules of some layers only, with scan_layers", f"{_ONE_PROGRAM}, with one dtype for each weight"),
    *refused(
        "precision.reduce=float32 with weights that rest in bfloat16",
        "a gradient has the dtype of its weight",
        "precision.master=float32",
        "--backend=native",
        when=lambda c, p: c.precision.master == "bfloat16",
    ),
    *refused(
        "precision.reduce=float32 with scan_layers and a lower compute dtype",
        "the loop's gradients have the dtype of the copies that it takes",
        "compile.scan_layers=false",
        when=lambda c, p: c.compile.scan_layers and c.precision.dtypes != {"float32"},
    ),
    Rule(
        "precision.reduce for weights in a lower dtype of other layers than linear ones and embeddings",
        "XLA sums a gradient in the dtype in which it is computed; precision.modules gives those layers float32",
    ),
    *refused(
        "precision.reduce=bfloat16 with modules in float32",
        "XLA sums the gradients of those modules in their compute dtype",
        "precision.modules={}",
        when=lambda c, p: "float32" in c.precision.modules.values(),
    ),
    Rule(
        "compile.scan_layers with memory.every",
        f"{_ONE_PROGRAM}: all layers are recomputed, or none",
        lambda c, p: c.compile.scan_layers and is_selective(c) and c.memory.every is not None,
        ("memory.gradient_checkpointing=full and memory.every=null", "compile.scan_layers=false"),
    ),
    *refused(
        "compile.scan_layers with memory.classes",
        f"{_ONE_PROGRAM}, which is recomputed as a whole",
        "memory.classes=[]",
        when=lambda c, p: bool(c.memory.classes),
    ),
    *refused(
        "compile.scan_layers with units by size",
        _ONE_UNIT,
        "sharding.wrap=TRANSFORMER_BASED_WRAP and sharding.min_num_params=null",
        when=lambda c, p: c.sharding.wrap == "SIZE_BASED_WRAP",
    ),
    *refused(
        "compile.scan_layers with units by name",
        _ONE_UNIT,
        "sharding.wrap_modules=[]",
        when=lambda c, p: bool(c.sharding.wrap_modules),
    ),
    Rule(
        "compile.scan_layers for layers that don't follow one another in a list of the model, or hold units "
        "(sharding.wrap_classes)",
        "a turn of the loop is a layer, gathered as one unit",
    ),
    Rule("compile.scan_layers for layers that differ (gemma2)", "all turns run one program"),
    *refused(
        "precision.products=int8 on TPU v4 and v6e",
        "compiled for them, a layer's products then take 1.4 times as long as in bfloat16",
        when=lambda c, p: p.generation in ("v4", "v6e"),
    ),
    *refused(
        "memory.offload without scanned layers that are recomputed",
        "the compiler would bring the input of an unrolled layer back at once",
        "memory.gradient_checkpointing=full and memory.every=null and memory.save_ops=[] and compile.scan_layers=true",
        "--backend=native",
        when=lambda c, p: not (c.compile.scan_layers and recomputes_modules(c)),
    ),
    Rule(
        "data.buckets of several sizes on several hosts",
        "each host reads other rows, and would choose another program than the rest",
        lambda c, p: c.data.shapes > 1 and (p.hosts or 1) > 1,
        only_largest_bucket,
    ),
    *refused("train.micro_batch=auto on cpu", "plans of a CPU are native's", when=lambda c, p: p.device == "cpu"),
)

NOTES = {
    "precision.reduce=auto": "the dtype that the weight is cast to at use",
    "precision.products=int8": "each row is scaled; the products for gradients of weights stay in bfloat16",
    "memory.save_ops=[attention]": (
        "changes nothing: a recomputed layer keeps the output of the TPUs' attention kernel in any case; cpu has none"
    ),
    "memory.save_ops": (
        "a recomputed layer keeps outputs of matrix products, and in any case those of the attention kernel on TPUs"
    ),
    "memory.offload=activations": (
        "libtpu keeps inputs of the loop's layers in host memory, and copies beside compute; on cpu it changes nothing"
    ),
}

SPEC = torch_xla_spec(
    "portable_fsdp.backends.torch_xla.spmd.engine:XlaBackend",
    rules=RULES,
    notes=NOTES,
    planned_by={"tpu": "compiled step"},
    processes=lambda device, requested, count: 1,  # which drives all devices of the host
)
