"""What trl's trainers need besides: their loss reads the head's weight itself, and never calls the head."""

import logging
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

log = logging.getLogger("portable_fsdp")


def is_of_trl(trainer: type[Any]) -> bool:
    """Whether a class is one of trl's, or a subclass of it."""
    return any(base.__module__.partition(".")[0] == "trl" for base in trainer.__mro__)


def gather_head(model: Any) -> None:
    """Gather a trained head's weight with the model, so that its gradient is summed over processes.

    Without this trl calls `full_tensor()` of the sharded weight, and each shard gets its own process's gradient alone.
    """
    if next(model.parameters()).device.type == "xla":
        log.info("trl counts tokens, entropy and accuracy in its loss: each step on XLA ends a program after forward")
    head: Any = model.get_output_embeddings()
    if not isinstance(head, FSDPModule) or not any(
        weight.requires_grad for weight in cast(nn.Module, head).parameters()
    ):
        return

    def gather(*_: Any) -> None:
        head.unshard()

    def free(module: nn.Module, *_: Any) -> None:
        if not module.training:  # else backward frees it
            head.reshard()

    model.register_forward_pre_hook(gather)
    model.register_forward_hook(free)


def wrong_for_trl(args: Any, devices: int, is_xla: bool) -> Iterator[str]:
    """Problems of SFTConfig and DPOConfig on this engine, each with what to do."""
    kinds = {base.__name__ for base in type(args).__mro__ if base.__module__.partition(".")[0] == "trl"}
    if "DPOConfig" in kinds and args.precompute_ref_log_probs:
        yield "precompute_ref_log_probs runs the model before the engine has sharded it.\n  Set it to False."
    if "DPOConfig" in kinds and is_xla:
        yield (
            "DPOTrainer picks the logits of completions by a mask, whose size XLA compiles anew in each step.\n  Train "
            "on backend=native, or with examples/dpo.py."
        )
    elif "DPOConfig" in kinds and devices > 1 and not args.dataloader_drop_last:
        yield (
            "DPOTrainer gathers rewards from all processes, which must have as many rows each.\n  Set "
            "dataloader_drop_last=True."
        )
    if "SFTConfig" not in kinds or not is_xla:
        return
    if args.padding_free or (args.packing and args.packing_strategy != "wrapped"):
        yield (
            "packing_strategy=bfd and padding_free make one row of a batch, which XLA's devices can't share.\n  Set "
            "packing_strategy='wrapped', or packing=False with pad_to_multiple_of=max_length."
        )
    elif not args.packing and (not args.max_length or (args.pad_to_multiple_of or 1) % args.max_length):
        yield (
            f"pad_to_multiple_of={args.pad_to_multiple_of}, max_length={args.max_length}: each length would be another "
            "program for XLA.\n  Set both to one number, or packing=True with packing_strategy='wrapped'."
        )
