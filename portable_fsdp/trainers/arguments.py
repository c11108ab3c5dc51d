"""From TrainingArguments to an Accelerator: what each says in the other's words, and what is refused.

TrainingArguments comes first: it empties accelerate's shared state, chooses a device, and under torchrun forms a
process group. The engine then chooses the device anew, and forms a group with a backend for host tensors too.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from portable_fsdp.accelerator import keep_xla_out
from portable_fsdp.accelerator.front import Accelerator
from portable_fsdp.accelerator.state import has_sharded, is_open, resolved_config
from portable_fsdp.config.schema import Sharding
from portable_fsdp.convert.table import TRAINER, KeyOutcome, UnreadableValue, find, outcome_of
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.trainers.of_trl import wrong_for_trl

log = logging.getLogger("portable_fsdp")

VERSIONS = ("5.23", "5.25")
"""The transformers whose Trainer this package knows: from the first, below the second."""

_had_group = False


def keep_transformers_off_xla() -> None:
    """Let transformers, imported before or after this, leave XLA to the engine: it would end steps and save by itself.

    Raises ConfigError for a transformers that isn't known.
    """
    global _had_group
    import transformers
    from transformers import masking_utils, training_args
    from transformers.utils import import_utils

    of_args, of_imports, of_masks = (_names(module) for module in (training_args, import_utils, masking_utils))

    if not Version(VERSIONS[0]) <= Version(transformers.__version__) < Version(VERSIONS[1]):
        raise ConfigError(
            f"on_portable: expected transformers {VERSIONS[0]} or newer, below {VERSIONS[1]}, found "
            f"{transformers.__version__}.\n  pip install 'transformers>={VERSIONS[0]},<{VERSIONS[1]}'"
        )
    if import_utils.is_torch_xla_available():  # TrainingArguments takes bf16 with it, or on some GPUs
        of_args["is_torch_bf16_gpu_available"] = lambda: True
    of_imports["USE_TORCH_XLA"] = "0"
    import_utils.is_torch_xla_available.cache_clear()
    keep_xla_out()
    if (is_tracing := of_masks["is_tracing"]) is not _is_tracing:
        _tracing.append(is_tracing)
        of_masks["is_tracing"] = _is_tracing
    _had_group = _had_group or (dist.is_initialized() and not is_open())


def _names(module: Any) -> dict[str, Any]:
    return cast(dict[str, Any], vars(module))


_tracing: list[Callable[..., bool]] = []  # transformers' function


def _is_tracing(tensor: Any = None) -> bool:
    """transformers' question whether a mask's values can be read now, which would cut a step of XLA in two."""
    return _tracing[0](tensor) or (isinstance(tensor, Tensor) and tensor.device.type == "xla")


def accelerator_of(args: Any, model: Any, options: Mapping[str, Any]) -> Accelerator:
    """The Accelerator of a Trainer, whose settings in `args` become those of one device for it. *collective*

    Raises ConfigError for arguments that the engine can't honour.
    """
    if args.distributed_state is not None and args.distributed_state.distributed_type == DistributedType.XLA:
        raise ConfigError("TrainingArguments has chosen XLA's first device.\n  Call on_portable(Trainer) before it.")
    _refuse(_wrong_everywhere(args, model))
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args) if args.fsdp_plugin_args else None
    if plugin is not None:
        _refuse(_contradictions(args.fsdp_config, plugin, options.get("sharding") or {}))
    given = dict(options)
    for section, values in _sections(args).items():
        given[section] = values | dict(given.get(section) or {})
    if args.use_cpu:
        given.setdefault("device", "cpu")
    config = args.accelerator_config
    loaders = DataLoaderConfiguration(
        split_batches=True,  # the last batch is then the one that one process reads, not completed
        dispatch_batches=config.dispatch_batches,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        non_blocking=config.non_blocking,
        data_seed=args.data_seed,
    )
    if dist.is_initialized() and not _had_group and not is_open():
        dist.destroy_process_group()  # of TrainingArguments: on GPUs without a backend for host tensors
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=loaders,
        fsdp_plugin=plugin,
        processes="one",
        **given,
    )
    accelerator.gradient_accumulation_steps = 1  # Trainer divides the loss; the engine knows the number
    devices, is_xla = accelerator.engine.row_shards, accelerator.engine.device.type == "xla"
    if is_xla and options.get("autocast"):
        raise ConfigError("on_portable: autocast=True: torch_xla casts some layers alone.\n  Leave it out: bf16=True.")
    _refuse(_wrong_on(args, devices, is_xla))
    _refuse(wrong_for_trl(args, devices, is_xla))
    _fit(args, accelerator.device, is_xla)
    return accelerator


def _fit(args: Any, device: torch.device, is_xla: bool) -> None:
    """Let a Trainer's own copy of TrainingArguments say what is so here."""
    vars(args)["_setup_devices"] = device
    args._n_gpu = min(1, args._n_gpu)  # no DataParallel
    if args.fsdp:
        args.fsdp, args.fsdp_plugin_args = False, None  # Trainer would ask for FSDP's own launcher
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        setattr(args, name, False)
    if is_xla:
        args.logging_nan_inf_filter = False  # as Trainer itself on XLA: it would read each micro batch's loss
        if args.optim == "adamw_torch_fused":
            log.info("optim: adamw_torch_fused has no kernel on XLA: adamw_torch computes the same")
            args.optim = type(args.optim)("adamw_torch")


def storable(args: Any) -> Any:
    """A copy for `training_args.bin`, without the engine that accelerate's shared state holds."""
    stored = copy.copy(args)
    stored.distributed_state = None
    vars(stored).pop("_setup_devices", None)
    return stored


def _sections(args: Any) -> dict[str, dict[str, Any]]:
    """Sections of our config that TrainingArguments sets."""
    sections: dict[str, dict[str, Any]] = {}
    if _recomputes(args):
        kwargs = dict(
            getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
        )
        every = int(kwargs.get("every_n_layers", 1))
        word = {"gradient_checkpointing": "full"} if every == 1 else {"gradient_checkpointing": "selective"}
        sections["memory"] = word | ({"every": every} if every > 1 else {})
        if kwargs.get("offload"):
            sections["memory"]["offload"] = "activations"
    if (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        sections["sharding"] = {"sync_each_micro_batch": True}
    if args.torch_compile:
        options = _outcome("torch_compile_backend", args.torch_compile_backend).options
        sections["compile"] = {name.partition(".")[2]: value for name, value in options.items()}
    return sections


def _recomputes(args: Any) -> bool:
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


# ------------------------------------------------------------------------------------------------------ what is refused


def _refuse(problems: Iterator[str]) -> None:
    if listed := [*problems]:
        raise ConfigError("\n".join(f"TrainingArguments: {problem}" for problem in listed))


def _wrong_everywhere(args: Any, model: Any) -> Iterator[str]:
    """Problems that no engine could solve, each with what to do."""
    for key in ("deepspeed", "auto_find_batch_size", "bf16_full_eval", "fp16_full_eval", "torch_compile_mode"):
        yield from _by_table(key, getattr(args, key, None))
    if args.torch_compile:
        yield from _by_table("torch_compile_backend", args.torch_compile_backend)
    if args.fsdp and (args.fsdp_config or {}).get("xla"):
        yield "fsdp_config: xla: torch_xla's wrapper isn't used.\n  Leave it out, and start with backend=xla."
    if args.save_only_model and args.load_best_model_at_end:
        yield "save_only_model: load_best_model_at_end reads whole checkpoints.\n  Set one of them to False."
    if isinstance(model, nn.Module) and (wrapper := _wrapper_of(model)):
        yield f"the model is wrapped already ({wrapper}).\n  Pass it as it was made: the engine shards it."


def _contradictions(
    words: Mapping[str, Any], plugin: FullyShardedDataParallelPlugin, options: Mapping[str, Any]
) -> Iterator[str]:
    """Words of `fsdp` that say otherwise than `on_portable(sharding=...)`."""
    by_words, default = resolved_config(None, [], plugin).sharding, Sharding()
    for key, value in options.items():
        word = getattr(by_words, key, value)
        is_word = word != getattr(default, key, word) or (key == "strategy" and "reshard_after_forward" in words)
        if is_word and word != value:
            yield f"fsdp: its words say {key}={word}, and on_portable(sharding=...) {value}.\n  Leave one of them out."


def _wrong_on(args: Any, devices: int, is_xla: bool) -> Iterator[str]:
    """Problems on this engine with this number of devices."""
    if is_xla and args.torch_compile:
        yield "torch_compile: XLA compiles each step itself.\n  Leave it out."
    if is_xla and args.train_sampling_strategy == "group_by_length":
        yield (
            "train_sampling_strategy=group_by_length: each length would be another program for XLA.\n  Leave it out, "
            "and pad all rows to one length (pad_to_multiple_of, or padding='max_length')."
        )
    if args.train_sampling_strategy == "batch_rebalance" and devices > 1:
        yield "train_sampling_strategy=batch_rebalance deals rows to processes itself.\n  Set it to random."
    if is_xla and getattr(args, "predict_with_generate", False):
        yield (
            "predict_with_generate: each token would be another program for XLA.\n  Leave it out, and generate from "
            "the saved folder."
        )
    if is_xla and args.use_liger_kernel:
        yield "use_liger_kernel: its kernels are of GPUs.\n  Leave it out."
    if devices > 1:
        yield from _by_table("average_tokens_across_devices", args.average_tokens_across_devices)
        yield from _by_table("neftune_noise_alpha", args.neftune_noise_alpha)
        if args.save_on_each_node:
            yield "save_on_each_node: the first host has the whole weights.\n  Save to a folder that all hosts see."
        if "loss" in args.include_for_metrics:
            yield "include_for_metrics: loss: losses of single rows aren't kept.\n  Take it out of the list."


def _by_table(key: str, value: Any) -> Iterator[str]:
    """The refusal of a value by the table of foreign keys, if it has one."""
    outcome = _outcome(key, value)
    if outcome.kind == "refuse":
        yield f"{key}={value}: {outcome.refuse}.\n  {outcome.fix[0].upper()}{outcome.fix[1:]}."


def _outcome(key: str, value: Any) -> KeyOutcome:
    row = find(TRAINER, key)
    if row is None or value is None:
        return KeyOutcome(ignore="none")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        return outcome_of(row, text)
    except UnreadableValue as error:
        return KeyOutcome(refuse=f"expected {error}")


def _wrapper_of(model: nn.Module) -> str:
    """What has wrapped or sharded a model, or an empty string."""
    wrappers = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
    for module in model.modules():
        if isinstance(module, wrappers) or hasattr(module, "_orig_mod"):
            return type(module).__name__
    if has_sharded(model):  # for an earlier Trainer
        return ""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "its weights are DTensors"
    return "its tensor parallelism" if cast(Any, getattr(model, "tp_size", None) or 1) > 1 else ""
