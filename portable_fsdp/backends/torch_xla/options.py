"""The options that the torch_xla engines refuse and delegate, notes, packages, and the TPU compiler's options.

Imports neither torch nor torch_xla: plans use the compiler options without them.
"""

from collections.abc import Mapping
from dataclasses import replace

from portable_fsdp.backends.open import EngineSpec, Package
from portable_fsdp.backends.refusals import (
    Rule,
    excluded_by,
    is_selective,
    modules_without_float16,
    only_largest_bucket,
    recomputes_modules,
    refused,
    refused_each,
)

_NO_LOSS_SCALING = "float16 needs loss scaling, which only native has; bfloat16 has the range of float32"

RULES = (
    *refused_each(
        "on XLA",
        {
            "model.attention=flex": "torch has no kernel of flex_attention for it",
            "memory.gradient_checkpointing=budget": "the partitioner of torch.compile applies the budget",
            "compile.cache_dir": (
                "torch_xla 2.9 writes compiled programs but can't load them (github.com/pytorch/xla/issues/9094)"
            ),
        },
    ),
    *refused_each(
        "on XLA",
        {
            "model.attention=sdpa|eager": (
                "transformers then reads a mask on the host in every step, which adds a program and a wait"
            ),
            "model.experts=grouped_mm": "it sorts tokens by expert, into shapes that XLA doesn't know when it compiles",
            "sharding.reshard_after_forward": "weights are either sharded over all devices of a replica or gathered",
            "precision.products=float8|float8_rowwise": "compiled for v6e it takes 1.11 times as long as bfloat16",
            "optim.name=adamw8bit": "bitsandbytes has no kernel for it",
            "memory.cpu_offload": "torch_xla keeps parameters and optimizer state in device memory",
        },
        "--backend=native",
    ),
    Rule(
        "precision.compute on XLA",
        _NO_LOSS_SCALING,
        lambda c, p: c.precision.compute == "float16",
        ("precision.compute=bfloat16", "--backend=native"),
    ),
)

NOTES = {
    "compile.cache_dir": "each start compiles again: torch_xla 2.9 cannot load a compiled program",
    "memory.budget": "not read: gradient_checkpointing=budget is refused",
    "memory.gradient_checkpointing=auto": "full: it has no planner",
}

_GATHERS = "XLA's scheduler starts gathers"
_COMPILES = "XLA compiles the whole step in any case"
DELEGATED = {
    "sharding.forward_prefetch": _GATHERS,
    "sharding.backward_prefetch": _GATHERS,
    "sharding.backward_prefetch_units": _GATHERS,
    "sharding.sync_each_micro_batch": "ignored: the program of each micro batch sums its gradients",
    "compile.enabled": _COMPILES,
    "compile.backend": _COMPILES,
}

# ------------------------------------------------------------------------------------------------------------------ xla

_ONE_PROGRAM = "all iterations of the loop run one program"
_ONE_UNIT = "the loop gathers a layer as one unit"

SPMD_RULES = (
    Rule(
        "precision.modules with float16 on xla",
        _NO_LOSS_SCALING,
        lambda c, p: "float16" in c.precision.modules.values(),
        modules_without_float16,
    ),
    Rule("precision.modules of some layers only, with scan_layers", f"{_ONE_PROGRAM}, with one dtype for each weight"),
    *refused(
        "precision.reduce=float32 with weights kept in bfloat16",
        "a gradient has the dtype of its weight",
        "precision.master=float32",
        "--backend=native",
        when=lambda c, p: c.precision.master == "bfloat16",
    ),
    *refused(
        "precision.reduce=float32 with scan_layers and a lower compute dtype",
        "the loop's gradients have the dtype of its copies",
        "compile.scan_layers=false",
        when=lambda c, p: c.compile.scan_layers and c.precision.dtypes != {"float32"},
    ),
    Rule(
        "precision.reduce for weights in a lower dtype outside linear layers and embeddings",
        "XLA sums a gradient in the dtype in which it is computed; set those layers to float32 in precision.modules",
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
    *excluded_by("memory.classes", {"compile.scan_layers": f"{_ONE_PROGRAM}, which is recomputed as a whole"}),
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
        "an iteration of the loop is a layer, gathered as one unit",
    ),
    Rule("compile.scan_layers for layers that differ (gemma2)", "all iterations run one program"),
    *excluded_by(
        "model.router_bias_rate", {"compile.scan_layers": f"{_ONE_PROGRAM}, with the buffers of the first layer"}
    ),
    *refused(
        "precision.products=int8 on TPU v4 and v6e",
        "compiled for them, a layer's products then take 1.4 times as long as in bfloat16",
        when=lambda c, p: p.generation in ("v4", "v6e"),
    ),
    *refused(
        "memory.offload without scanned layers that are recomputed",
        "the compiler would copy the input of an unrolled layer back at once",
        "memory.gradient_checkpointing=full and memory.every=null and memory.save_ops=[] and compile.scan_layers=true",
        "--backend=native",
        when=lambda c, p: not (c.compile.scan_layers and recomputes_modules(c)),
    ),
    Rule(
        "data.buckets of several sizes on several hosts",
        "each host reads different rows, and would choose a different program",
        lambda c, p: c.data.shapes > 1 and (p.hosts or 1) > 1,
        only_largest_bucket,
    ),
    *refused("train.micro_batch=auto on cpu", "only native plans a CPU", when=lambda c, p: p.device == "cpu"),
)

SPMD_NOTES = {
    "precision.reduce=auto": "the dtype to which the weight is cast at use",
    "precision.products=int8": "each row is scaled; the products for gradients of weights stay in bfloat16",
    "memory.gradient_checkpointing=auto": (
        "the fastest by plan, of those that fit, of none, selective that keeps products, and full; on cpu full"
    ),
    "memory.save_ops=[attention]": (
        "no effect: a recomputed layer always keeps the output of the TPUs' attention kernel; cpu has none"
    ),
    "memory.save_ops": (
        "a recomputed layer keeps outputs of matrix products, and always those of the attention kernel on TPUs"
    ),
    "memory.offload=activations": (
        "libtpu keeps inputs of the loop's layers in host memory, and copies overlap compute; on cpu no effect"
    ),
}

SPMD = EngineSpec(
    engine="portable_fsdp.backends.torch_xla.spmd.engine:XlaBackend",
    packages={
        "cpu": Package("torch_xla", "In a checkout of portable_fsdp: pip install '.[xla]'"),
        "tpu": Package("torch_xla", "In a checkout of portable_fsdp: pip install '.[tpu]'"),
    },
    example_device="tpu",
    rules=(*RULES, *SPMD_RULES),
    processes=lambda device, requested, count: 1,  # it drives all devices of the host
    launcher_counts_devices=False,
    planned_by={"tpu": "compiled step"},
    notes={**NOTES, **SPMD_NOTES},
    delegated={
        **DELEGATED,
        "run.peer_timeout_s": "PJRT detects a lost process by its own timeouts, gloo after 30 minutes",
    },
    other_devices={
        "cuda": "torch_xla dropped its CUDA support with release 2.8.\n"
        "  Use --backend=native (FSDP2 on NCCL) on GPUs; the config and the checkpoints are the same."
    },
)


# ------------------------------------------------------------------------------------------------------------ xla_fsdp1

_FLOAT32_ONLY = "XlaFullyShardedDataParallel takes float32 weights only"

FSDP1_RULES = (
    *refused(
        "precision.frozen=bfloat16|nf4|nf4_double|int8 on xla_fsdp1",
        _FLOAT32_ONLY,
        "--backend=xla",
        when=lambda c, p: c.model.freezes,
    ),
    *refused_each(
        "on xla_fsdp1",
        {
            "precision.master": _FLOAT32_ONLY,
            "precision.cast_inputs": "XlaFullyShardedDataParallel casts the inputs of each unit",
            "precision.modules": "XlaFullyShardedDataParallel casts a whole unit to one compute dtype",
            "precision.products=int8": "its layers are torch's",
            "optim.name=adafactor|muon": "it needs whole matrices, and a device has flat parts of them",
            "optim.factory": "an optimizer may need whole matrices, and a device has flat parts of them",
            "sharding.tensor": "XlaFullyShardedDataParallel shards over all devices",
            "sharding.context sharding.expert": "XlaFullyShardedDataParallel gives each device its own rows",
            "compile.scan_layers": "each unit's module gathers its own weights, one layer after the other",
        },
        "--backend=xla",
    ),
    *refused_each(
        "on xla_fsdp1",
        {
            "memory.offload": "torch_xla's checkpoint keeps the inputs of recomputed layers in device memory",
            "train.micro_batch=auto": "it has no planner",
        },
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
        "each device has a process, which reads different rows and would choose a different program",
        lambda c, p: c.data.shapes > 1 and (p.devices or 1) > 1,
        only_largest_bucket,
    ),
    *refused(
        "xla_fsdp1.flatten_parameters with weight decay or optimizer groups",
        "a unit's parameters are one tensor, with one weight decay and one learning rate",
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
        "xla_fsdp1.shard_param_on_dim_0 for a model with a 0-dim parameter",
        "it has no rows to shard; false shards each parameter flat",
    ),
)

FSDP1 = replace(
    SPMD,
    engine="portable_fsdp.backends.torch_xla.fsdp1.engine:XlaFsdp1Backend",
    rules=(*RULES, *FSDP1_RULES),
    notes=NOTES,
    delegated={**DELEGATED, "run.peer_timeout_s": "PJRT detects a lost process by its own timeouts"},
    planned_by={},
    # One per chip. PJRT's CPU devices can't communicate across processes.
    processes=lambda device, requested, count: count(device) if device == "tpu" else 1,
)


# ---------------------------------------------------------------------------------------------------- libtpu's compiler

COMPILER_OPTIONS = {
    # Windowed einsum hides gathers in loops of point-to-point copies, which makes them uncountable and costs memory.
    "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    # torch_xla's own, which it adds if it sees chips (torch_xla/__init__.py, _setup_libtpu_flags): a plan sees none.
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
"""Options of the TPU compiler on all generations, the same in a run and in a plan."""

# torch_xla's own on v5 (as above). On v4 all gathers would be synchronous without them: a step takes 4 % longer.
_ASYNC_GATHERS = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}

# The SparseCore runs collectives while the TensorCore computes: gradient reductions go there, gathers stay fused with
# products. Source: AI-Hypercomputer/maxtext@05d3525, benchmarks/xla_flags_library.py
# (ENABLE_SPARECORE_OFFLOADING_FOR_ALL_REDUCE; libtpu 0.0.21 refuses xla_sc_disjoint_spmem and the chip config from it);
# for reduce-scatters MaxText's recipes (reduce_scatter_v2). docs/sharding.md has the gain.
_ON_SPARSE_CORE = {
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_all_reduce_offload_tracing": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "false",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
    "xla_tpu_enable_reduce_scatter_offload_tracing": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "false",
}

COMPILER_OPTIONS_OF = {
    # Without a SparseCore: libtpu's other asynchronous reductions (xla_enable_async_all_reduce, ..._reduce_scatter
    # fusion) shorten a step by 0.4 % at most there, and take 0.8 GiB on v5e.
    "v4": _ASYNC_GATHERS,
    "v5e": _ASYNC_GATHERS,
    "v5p": {**_ASYNC_GATHERS, **_ON_SPARSE_CORE},
    "v6e": _ON_SPARSE_CORE,
}
"""Further options of each generation."""


def libtpu_arguments(environ: Mapping[str, str], generation: str = "") -> str:
    """Return LIBTPU_INIT_ARGS for a run and a plan: the user's arguments, then our defaults for the rest.

    Args:
        environ: the environment with the user's arguments.
        generation: of the chip: `v5p`; empty leaves out the options of single generations.
    """
    arguments = environ.get("LIBTPU_INIT_ARGS", "").split()
    users = set(compiler_options(" ".join(arguments)))
    ours = {**COMPILER_OPTIONS, **COMPILER_OPTIONS_OF.get(generation, {})}
    return " ".join([*arguments, *(f"--{name}={value}" for name, value in ours.items() if name not in users)])


def compiler_options(arguments: str) -> dict[str, str]:
    """Name -> value of the options in LIBTPU_INIT_ARGS; a name alone is `true`."""
    pairs = [argument.lstrip("-").partition("=") for argument in arguments.split()]
    return {name: value or "true" for name, _, value in pairs}
