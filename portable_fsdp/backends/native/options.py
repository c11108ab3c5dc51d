"""What native (FSDP2) does with each option. No torch here."""

from collections.abc import Callable

from portable_fsdp.backends.options import EngineOptions, Package
from portable_fsdp.config.rules import Deployment, Effect, Rule, is_hybrid, parts, shards_of_a_replica
from portable_fsdp.config.schema import Compile, Config


def _reshards(config: Config) -> bool:
    return config.sharding.strategy in ("FULL_SHARD", "HYBRID_SHARD")


def _reshard_does_not_fit(config: Config, place: Deployment) -> bool:
    wanted, shards = config.sharding.reshard_after_forward, shards_of_a_replica(config, place)
    return wanted is not None and _reshards(config) and shards is not None and wanted not in parts(shards)


def _reshard_that_fits(config: Config, place: Deployment) -> tuple[str, ...]:
    wanted = config.sharding.reshard_after_forward or 0
    nearest = sorted(parts(shards_of_a_replica(config, place)), key=lambda part: abs(part - wanted))
    return tuple(f"sharding.reshard_after_forward={count}" for count in (*nearest[:1], "null"))


RULES = (
    Rule(
        "model.attention",
        "on another device than cuda",
        lambda c, p: c.model.attention == "flex" and p.device != "cuda",
        "torch has no backward of flex_attention there",
        ("model.attention=auto",),
    ),
    Rule(
        "model.attention",
        "with another compile.backend than inductor",
        lambda c, p: c.model.attention == "flex" and c.compile.enabled and c.compile.backend != "inductor",
        "without inductor's kernel all scores would be in memory",
        ("compile.backend=inductor", "model.attention=auto"),
    ),
    Rule(
        "model.attention",
        "with memory.save_ops",
        lambda c, p: c.model.attention == "flex" and bool(c.memory.save_ops),
        "what is compiled shows torch no operators to choose from",
        (
            "memory.save_ops=[] and memory.gradient_checkpointing=full and memory.every=null",
            "model.attention=auto",
        ),
    ),
    Rule(
        "model.attention",
        "flex for a model that doesn't give its layers what forward is told (stablelm), or has no attention (mamba2)",
        None,
        "the masks of a forward would not reach the layers; model.attention=auto",
    ),
    Rule(
        "sharding.reshard_after_forward",
        "with a strategy that keeps weights gathered after forward",
        lambda c, p: c.sharding.reshard_after_forward is not None and not _reshards(c),
        "only FULL_SHARD and HYBRID_SHARD shard them again after forward",
        lambda c, p: (
            "sharding.reshard_after_forward=null",
            f"sharding.strategy={'HYBRID_SHARD' if is_hybrid(c) else 'FULL_SHARD'}",
        ),
    ),
    Rule(
        "sharding.reshard_after_forward",
        "that does not divide the devices of a replica, or is all of them",
        _reshard_does_not_fit,
        "after forward each group of so many devices keeps the whole model between them",
        _reshard_that_fits,
    ),
    Rule(
        "compile.backend",
        "without compile.enabled",
        lambda c, p: not c.compile.enabled and c.compile.backend != Compile.model_fields["backend"].default,
        "nothing is compiled by it",
        ("compile.backend=inductor", "compile.enabled=true"),
    ),
    Rule(
        "compile.backend",
        "on cpu",
        lambda c, p: c.compile.enabled and c.compile.backend == "inductor" and p.device == "cpu",
        "inductor would build C++ for this host, which is neither tried nor fast",
        ("compile.backend=aot_eager", "compile.enabled=false"),
    ),
    Rule(
        "compile.scan_layers",
        "on native",
        lambda c, p: c.compile.scan_layers,
        "a loop over layers is a program of XLA's; torch.compile shares one program between equal layers by itself",
        ("compile.scan_layers=false", "--backend=xla"),
    ),
)

EFFECTS = (
    Effect(("run.peer_timeout_s",), "each process says that it lives, through the store where all met"),
    Effect(
        ("data.packing=documents",),
        "the same rows on every engine; one mask a forward, which all layers share, keeps documents apart",
    ),
    Effect(("model.attention=flex",), "torch's flex_attention, compiled; masks once a forward for each window"),
    Effect(("model.experts=grouped_mm",), "tokens sorted by expert"),
    Effect(
        ("sharding.strategy=FULL_SHARD",),
        "fully_shard over all devices: a unit is gathered in forward, and again in backward",
    ),
    Effect(
        ("sharding.strategy=SHARD_GRAD_OP",),
        "fully_shard over all devices: a unit is gathered in forward and kept until its backward",
    ),
    Effect(("sharding.strategy=NO_SHARD",), "a copy on each device; gradients are all-reduced"),
    Effect(
        ("sharding.strategy=HYBRID_SHARD", "sharding.strategy=HYBRID_SHARD_ZERO2"),
        "fully_shard on the mesh (replicate, shard): reduce-scatter within a replica, all-reduce across",
    ),
    Effect(("sharding.reshard_after_forward",), "fully_shard(reshard_after_forward=number)"),
    Effect(
        ("sharding.wrap", "sharding.wrap_modules", "sharding.min_num_params"),
        "each unit is given to fully_shard, inner ones first, the whole model last",
    ),
    Effect(("sharding.forward_prefetch",), "set_modules_to_forward_prefetch, in the order of execution"),
    Effect(("sharding.forward_prefetch=0",), "FSDP2's own: the next gather is queued while a unit computes"),
    Effect(
        ("sharding.backward_prefetch", "sharding.backward_prefetch_units"),
        "units are gathered ahead in the reverse order of execution",
    ),
    Effect(("sharding.backward_prefetch=NO_PREFETCH",), "a unit is gathered in backward when it is needed"),
    Effect(("precision.compute",), "MixedPrecisionPolicy(param_dtype); weights are cast unit by unit"),
    Effect(("precision.reduce",), "MixedPrecisionPolicy(reduce_dtype)"),
    Effect(("precision.reduce=auto",), "float32"),
    Effect(("precision.modules",), "a group of fully_shard with its own param_dtype; inputs and outputs are cast"),
    Effect(("precision.matmul",), "torch.set_float32_matmul_precision, while the backend is open"),
    Effect(
        ("memory.gradient_checkpointing=full", "memory.gradient_checkpointing=selective", "memory.every"),
        "torch.utils.checkpoint around a layer's forward",
    ),
    Effect(("memory.save_ops",), "a selective checkpoint keeps the outputs of these operations"),
    Effect(("memory.cpu_offload=true",), "CPUOffloadPolicy: the optimizer steps on the host"),
    Effect(("compile.enabled", "compile.backend"), "torch.compile of each layer"),
    Effect(("compile.enabled=false",), "layers run eagerly"),
)


def _processes(device: str, wanted: int | None, count: Callable[[str], int]) -> int:
    """One a device; on CPU one unless more are asked for."""
    return wanted or (count(device) if device == "cuda" else 1)


_TORCH = Package("torch", "In a checkout of portable_fsdp: pip install '.'")

OPTIONS = EngineOptions(
    name="native",
    engine="portable_fsdp.backends.native.engine:NativeBackend",
    packages={
        "cpu": _TORCH,
        "cuda": _TORCH,
        "tpu": Package(
            "torch_tpu", "It is TorchTPU, for torch 2.11 and newer. Use --backend=xla on TPUs.", is_ours=False
        ),
    },
    made_for=("cpu", "cuda"),
    example_device="cuda",
    rules=RULES,
    effects=EFFECTS,
    processes=_processes,
    launcher_counts_devices=True,
)
