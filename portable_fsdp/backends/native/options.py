"""The options that native (FSDP2) refuses, and notes on how it honours others. Imports no torch."""

from portable_fsdp.backends.open import EngineSpec, Package
from portable_fsdp.backends.refusals import (
    Deployment,
    Rule,
    divisors,
    excluded_by,
    modules_without_float16,
    recomputes_modules,
    refused,
    refused_each,
    shards_of_a_replica,
)
from portable_fsdp.config.schema import Config


def _compiler(config: Config, place: Deployment) -> str | None:
    """The compiler of layers at `place`; None without compile.enabled. `auto` compiles on GPUs alone."""
    enabled, backend = config.compile.enabled, config.compile.backend
    if not (place.device == "cuda" if enabled == "auto" else enabled):
        return None
    usual = "tpu" if place.device == "tpu" else "inductor"
    return usual if backend == "auto" else backend


def _reshards(config: Config) -> bool:
    return config.sharding.strategy in ("FULL_SHARD", "HYBRID_SHARD")


def _reshard_does_not_fit(config: Config, place: Deployment) -> bool:
    number, shards = config.sharding.reshard_after_forward, shards_of_a_replica(config, place)
    return number is not None and _reshards(config) and shards is not None and number not in divisors(shards)


def _reshard_that_fits(config: Config, place: Deployment) -> tuple[str, ...]:
    number = config.sharding.reshard_after_forward or 0
    nearest = sorted(divisors(shards_of_a_replica(config, place)), key=lambda part: abs(part - number))
    return tuple(f"sharding.reshard_after_forward={count}" for count in (*nearest[:1], "null"))


_HOST_MEMORY = "it needs pinned host memory and copies that overlap compute; TorchTPU 0.2.0 guarantees neither"
_NO_FLOAT16 = "TPUs multiply in bfloat16, which needs no loss scaling"

RULES = (
    *refused_each(
        "on tpu",
        {
            "compile.backend=inductor": "TorchTPU has its own compiler and refuses inductor",
            "train.micro_batch=auto": "a plan is a lower bound there",
            "memory.offload memory.cpu_offload": _HOST_MEMORY,
            "optim.name=adamw8bit": "bitsandbytes has no kernel for it",
            "precision.products=float8|float8_rowwise": "torchao's kernels run on GPUs",
            "precision.frozen=nf4|nf4_double|int8": "TorchTPU has no tested view of bytes as other numbers",
            "observe.profile": "torch.profiler records no operation that TorchTPU 0.2.0 runs on a chip",
        },
        when=lambda c, p: p.device == "tpu",
    ),
    Rule("precision.frozen in 4 or 8 bits for experts in compiled layers", "the layers would keep dequantised experts"),
    Rule(
        "precision.compute on tpu",
        _NO_FLOAT16,
        lambda c, p: c.precision.compute == "float16" and p.device == "tpu",
        ("precision.compute=bfloat16",),
    ),
    Rule(
        "precision.modules with float16 on tpu",
        _NO_FLOAT16,
        lambda c, p: "float16" in c.precision.modules.values() and p.device == "tpu",
        modules_without_float16,
    ),
    *refused(
        "model.attention=flex on a device other than cuda",
        "torch has no backward of flex_attention there",
        when=lambda c, p: p.device != "cuda",
    ),
    *refused(
        "model.attention=flex with a compile.backend other than inductor",
        "without inductor's kernel all scores would be in memory",
        "compile.backend=inductor",
        when=lambda c, p: _compiler(c, p) not in (None, "inductor"),
    ),
    Rule(
        "model.attention with memory.save_ops, without compile.enabled",
        "torch compiles flex_attention by itself there, and sees no operators inside",
        lambda c, p: c.model.attention == "flex" and bool(c.memory.save_ops) and _compiler(c, p) is None,
        ("compile.enabled=true", "model.attention=auto"),
    ),
    Rule(
        "model.attention flex for a model that hides its forward's arguments from its layers (stablelm), or has no "
        "attention (mamba2)",
        "the masks of a forward would not reach the layers; model.attention=auto",
    ),
    Rule(
        "sharding.reshard_after_forward with a strategy that keeps weights gathered after forward",
        "only FULL_SHARD and HYBRID_SHARD reshard them after forward",
        lambda c, p: c.sharding.reshard_after_forward is not None and not _reshards(c),
        lambda c, p: (
            "sharding.reshard_after_forward=null",
            f"sharding.strategy={'HYBRID_SHARD' if c.sharding.is_hybrid else 'FULL_SHARD'}",
        ),
    ),
    Rule(
        "sharding.reshard_after_forward that does not divide the devices of a replica, or is all of them",
        "after forward, each group of this many devices holds the whole model",
        _reshard_does_not_fit,
        _reshard_that_fits,
    ),
    *refused(
        "compile.backend without compile.enabled=true",
        "nothing is compiled by it",
        "compile.enabled=true",
        when=lambda c, p: c.compile.enabled is False,
    ),
    Rule(
        "compile.backend on cpu",
        "inductor would build C++ for this host, which is neither tested nor fast",
        lambda c, p: _compiler(c, p) == "inductor" and p.device == "cpu",
        ("compile.backend=aot_eager", "compile.enabled=false"),
    ),
    Rule(
        "compile.cache_dir without inductor",
        "only inductor and TorchTPU keep programs there",
        lambda c, p: c.compile.cache_dir is not None and _compiler(c, p) != "inductor" and p.device != "tpu",
        lambda c, p: (
            "compile.cache_dir=null",
            *(("compile.enabled=true and compile.backend=inductor",) if p.device == "cuda" else ()),
        ),
    ),
    Rule(
        "memory.gradient_checkpointing budget without a compiler that divides layers into forward and backward",
        "the partitioner of torch.compile applies the budget",
        lambda c, p: c.memory.gradient_checkpointing == "budget" and _compiler(c, p) not in ("inductor", "aot_eager"),
        lambda c, p: (
            f"compile.enabled=true and compile.backend={'inductor' if p.device == 'cuda' else 'aot_eager'}",
            "memory.gradient_checkpointing=none and memory.budget=0.5",
        ),
    ),
    *refused(
        "memory.offload without recomputed layers",
        "it moves their inputs",
        "memory.gradient_checkpointing=full",
        when=lambda c, p: not recomputes_modules(c),
    ),
    *excluded_by(
        "memory.cpu_offload",
        {"optim.name=adafactor|muon": "its sums over shards would cross the network from host memory"},
    ),
    *excluded_by(
        "memory.cpu_offload",
        {"precision.products=float8": "shards would be cast on the host, where they are kept"},
        "precision.products=float8_rowwise",
    ),
    *refused("precision.products=int8 on native", "only XLA has it", "--backend=xla"),
    *refused(
        "compile.scan_layers on native",
        "only XLA compiles a loop over layers; torch.compile already shares one program between equal layers",
        "--backend=xla",
    ),
)

NOTES = {
    "precision.products=float8": "torchao's, which gathers in float8; emulated on cpu and on GPUs older than sm89",
    "precision.products=float8_rowwise": "torchao's; emulated on cpu and on GPUs older than sm89",
    "memory.offload=activations": (
        "inputs of recomputed layers are copied to pinned host memory and back, overlapping compute; on cpu no copies"
    ),
    "memory.cpu_offload=true": "CPUOffloadPolicy: the optimizer steps on the host",
    "memory.gradient_checkpointing=auto": (
        "the fastest by plan, of those that fit, of none, selective that keeps products and attention, selective that "
        "keeps attention, and full; on tpu full, since a plan is a lower bound there"
    ),
    # benchmarks/llama3_h100_202412_torchtitan.md in torchtitan's repository: 5,762 and 6,667 tokens/s per GPU.
    "compile.enabled=auto": (
        "on cuda on, if each layer compiles to one program without a break and the run's steps save more than a minute "
        "for each program; elsewhere off. torchtitan's 8B on 8 H100s gains 16 %"
    ),
}


_TORCH = Package("torch", "In a checkout of portable_fsdp: pip install '.'")
_TORCH_TPU = Package(
    "torch_tpu",
    "In a checkout of portable_fsdp, in a new environment: pip install '.[torchtpu]'. With torch_xla: --backend=xla.",
    is_usual=False,
    checked_by="portable_fsdp.backends.native.torchtpu:check",
    prepared_by="portable_fsdp.backends.native.torchtpu:prepare_start",
)

SPEC = EngineSpec(
    engine="portable_fsdp.backends.native.engine:NativeBackend",
    packages={"cpu": _TORCH, "cuda": _TORCH, "tpu": _TORCH_TPU},
    example_device="cuda",
    planned_by={"cpu": "fake step", "cuda": "fake step", "tpu": "fake step"},
    rules=RULES,
    notes=NOTES,
    # One process per device; on CPU one by default.
    processes=lambda device, requested, count: requested or (1 if device == "cpu" else count(device)),
    launcher_counts_devices=True,
)
