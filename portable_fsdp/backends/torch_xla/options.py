"""What both torch_xla engines refuse and delegate, which packages they need, and the TPU compiler's options.

Imports neither torch nor torch_xla: plans use the compiler options without them.
"""

from collections.abc import Mapping

from portable_fsdp.backends.open import EngineSpec, Package, PlanMethod, ProcessCount
from portable_fsdp.backends.refusals import Rule, refused_each

NO_LOSS_SCALING = "float16 needs loss scaling, which only native has; bfloat16 has the range of float32"
_READS_MASKS = "transformers then reads a mask on the host in every step, which is a second program and a wait"
_SORTS_TOKENS = "it sorts tokens by expert: shapes that are known only while the step runs, and XLA compiles before"
_NO_CACHE = "torch_xla 2.9 writes compiled programs and can't load them (github.com/pytorch/xla/issues/9094)"
_IN_DEVICE_MEMORY = "torch_xla keeps parameters and optimizer state in device memory"
_NOTHING_BETWEEN = "weights are sharded over all devices of a replica, or gathered, and nothing between"

RULES = (
    *refused_each(
        "on XLA",
        {
            "model.attention=sdpa|eager": _READS_MASKS,
            "model.attention=flex": "torch has no kernel of flex_attention for it",
            "model.experts=grouped_mm": _SORTS_TOKENS,
            "sharding.reshard_after_forward": _NOTHING_BETWEEN,
            "memory.gradient_checkpointing=budget": "it is the partitioner of torch.compile that keeps to a budget",
            "compile.cache_dir": _NO_CACHE,
            "precision.products=float8|float8_rowwise": "compiled for v6e it takes 1.11 of the time of bfloat16",
            "optim.name=adamw8bit": "bitsandbytes has no kernel for it",
            "memory.cpu_offload": _IN_DEVICE_MEMORY,
        },
        "--backend=native",
    ),
    Rule(
        "precision.compute on XLA",
        NO_LOSS_SCALING,
        lambda c, p: c.precision.compute == "float16",
        ("precision.compute=bfloat16", "--backend=native"),
    ),
)

NOTES = {
    "compile.cache_dir": "each start compiles again: torch_xla 2.9 cannot load a compiled program",
    "memory.budget": "not read: gradient_checkpointing=budget is refused",
}

_GATHERS = "XLA's scheduler starts gathers"
_COMPILES = "XLA compiles the whole step in any case"
DELEGATED = {
    "run.peer_timeout_s": "PJRT finds a lost process by its own timeouts, gloo after 30 minutes",
    "sharding.forward_prefetch": _GATHERS,
    "sharding.backward_prefetch": _GATHERS,
    "sharding.backward_prefetch_units": _GATHERS,
    "sharding.sync_each_micro_batch": "the program of a micro batch sums its gradients",
    "compile.enabled": _COMPILES,
    "compile.backend": _COMPILES,
}


def torch_xla_spec(
    engine: str,
    *,
    rules: tuple[Rule, ...],
    processes: ProcessCount,
    notes: Mapping[str, str] = {},
    planned_by: Mapping[str, PlanMethod] = {},
) -> EngineSpec:
    """What an engine of torch_xla declares by itself, and what is the same for both."""
    checkout = "In a checkout of portable_fsdp: pip install"
    return EngineSpec(
        engine=engine,
        packages={
            "cpu": Package("torch_xla", f"{checkout} '.[xla]'"),
            "tpu": Package("torch_xla", f"{checkout} '.[tpu]'"),
        },
        example_device="tpu",
        rules=(*RULES, *rules),
        notes={**NOTES, **notes},
        delegated=DELEGATED,
        processes=processes,
        planned_by=planned_by,
        launcher_counts_devices=False,
        other_devices={
            "cuda": "torch_xla dropped its CUDA support with release 2.8.\n"
            "  Use --backend=native (FSDP2 on NCCL) on GPUs; the config and the checkpoints are the same."
        },
    )


COMPILER_OPTIONS = {
    # Windowed einsum hides gathers in loops of point-to-point copies, which makes them uncountable and costs memory.
    "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    # torch_xla's own, which it adds where it sees chips (torch_xla/__init__.py, _setup_libtpu_flags): a plan sees none.
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
"""Options of the TPU compiler on all generations, the same in a run and in a plan."""

# torch_xla's own on v5 (as above). On v4 all gathers would be synchronous without: a step takes 4 % longer.
_ASYNC_GATHERS = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}

# The SparseCore runs collectives while the TensorCore computes: gradient reductions go there, gathers stay fused with
# products. Source: AI-Hypercomputer/maxtext@05d3525, benchmarks/xla_flags_library.py
# (ENABLE_SPARECORE_OFFLOADING_FOR_ALL_REDUCE, of whose names libtpu 0.0.21 refuses xla_sc_disjoint_spmem and the chip
# config); for reduce-scatters MaxText's recipes (reduce_scatter_v2). docs/sharding.md has what it buys.
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
"""What a generation has besides."""


def libtpu_arguments(environ: Mapping[str, str], generation: str = "") -> str:
    """LIBTPU_INIT_ARGS as a run and a plan have it: what the user set there, then ours that aren't among it.

    Args:
        environ: where the user's own are.
        generation: of the chip: `v5p`; empty leaves out what some generations have.
    """
    arguments = environ.get("LIBTPU_INIT_ARGS", "").split()
    given = set(compiler_options(" ".join(arguments)))
    ours = {**COMPILER_OPTIONS, **COMPILER_OPTIONS_OF.get(generation, {})}
    return " ".join([*arguments, *(f"--{name}={value}" for name, value in ours.items() if name not in given)])


def compiler_options(arguments: str) -> dict[str, str]:
    """Name -> value of what stands in LIBTPU_INIT_ARGS; a name alone is `true`."""
    pairs = [argument.lstrip("-").partition("=") for argument in arguments.split()]
    return {name: value or "true" for name, _, value in pairs}
