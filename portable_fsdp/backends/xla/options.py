"""What xla (torch_xla SPMD) does with each option. No torch here."""

from portable_fsdp.backends.pjrt_options import NO_LOSS_SCALING, TorchXlaOptions
from portable_fsdp.config.rules import Refused, Rule, dtypes, is_selective, modules_without_float16, only_largest_bucket

RULES = (
    Rule(
        "precision.modules",
        "with float16 on xla",
        lambda c, p: "float16" in c.precision.modules.values(),
        NO_LOSS_SCALING,
        modules_without_float16,
    ),
    Rule(
        "precision.modules",
        "of some layers only, with scan_layers",
        None,
        "all turns of the loop run one program, with one dtype for each weight",
    ),
    Refused(
        "precision.reduce=float32",
        "with weights that rest in bfloat16",
        "a gradient has the dtype of its weight",
        "precision.master=float32",
        "--backend=native",
        when=lambda c, p: c.precision.master == "bfloat16",
    ),
    Refused(
        "precision.reduce=float32",
        "with scan_layers and a lower compute dtype",
        "the loop's gradients have the dtype of the copies that it takes",
        "compile.scan_layers=false",
        when=lambda c, p: c.compile.scan_layers and dtypes(c) != {"float32"},
    ),
    Rule(
        "precision.reduce",
        "for weights in a lower dtype of other layers than linear ones and embeddings",
        None,
        "XLA sums a gradient in the dtype in which it is computed; precision.modules gives those layers float32",
    ),
    Refused(
        "precision.reduce=bfloat16",
        "with modules in float32",
        "XLA sums the gradients of those modules in their compute dtype",
        "precision.modules={}",
        when=lambda c, p: "float32" in c.precision.modules.values(),
    ),
    Rule(
        "compile.scan_layers",
        "with memory.every",
        lambda c, p: c.compile.scan_layers and is_selective(c) and c.memory.every is not None,
        "all turns of the loop run one program: all layers are recomputed, or none",
        ("memory.gradient_checkpointing=full and memory.every=null", "compile.scan_layers=false"),
    ),
    Refused(
        "compile.scan_layers",
        "with memory.classes",
        "all turns of the loop run one program, which is recomputed as a whole",
        "memory.classes=[]",
        when=lambda c, p: bool(c.memory.classes),
    ),
    Refused(
        "compile.scan_layers",
        "with units by size",
        "the loop gathers a layer as one unit",
        "sharding.wrap=TRANSFORMER_BASED_WRAP and sharding.min_num_params=null",
        when=lambda c, p: c.sharding.wrap == "SIZE_BASED_WRAP",
    ),
    Refused(
        "compile.scan_layers",
        "with units by name",
        "the loop gathers a layer as one unit",
        "sharding.wrap_modules=[]",
        when=lambda c, p: bool(c.sharding.wrap_modules),
    ),
    Rule(
        "compile.scan_layers",
        "for layers that don't follow one another in a list of the model, or hold units (sharding.wrap_classes)",
        None,
        "a turn of the loop is a layer, gathered as one unit",
    ),
    Rule("compile.scan_layers", "for layers that differ (gemma2)", None, "all turns run one program"),
    Refused(
        "precision.products=int8",
        "on TPU v4 and v6e",
        "compiled for them, a layer's products then take 1.4 times as long as in bfloat16",
        when=lambda c, p: p.generation in ("v4", "v6e"),
    ),
    Refused(
        "memory.offload=activations",
        "without scanned layers that are recomputed",
        "the compiler would bring the input of an unrolled layer back at once",
        "memory.gradient_checkpointing=full and memory.every=null and memory.save_ops=[] and compile.scan_layers=true",
        "--backend=native",
        when=lambda c, p: not (c.compile.scan_layers and c.memory.gradient_checkpointing in ("full", "selective")),
    ),
    Rule(
        "data.buckets",
        "of several sizes on several hosts",
        lambda c, p: c.data.shapes > 1 and (p.hosts or 1) > 1,
        "each host reads other rows, and would choose another program than the rest",
        only_largest_bucket,
    ),
    Refused("train.micro_batch=auto", "on cpu", "plans of a CPU are native's", when=lambda c, p: p.device == "cpu"),
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

OPTIONS = TorchXlaOptions(
    "portable_fsdp.backends.xla.engine:XlaBackend",
    rules=RULES,
    notes=NOTES,
    planned_by={"tpu": "compiled step"},
    processes=lambda device, requested, count: 1,  # which drives all devices of the host
)
