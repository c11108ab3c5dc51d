"""What trl's trainers need besides: their loss reads the head's weight itself, and never calls the head."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_of_trl(trainer: type[Any]) -> bool:
    """Whether a class is one of trl's, or a subclass of it."""
    return any(base.__module__.partition(".")[0] == "trl" for base in trainer.__mro__)


def gather_head(model: Any) -> None:
    """Gather a trained head's weight with the model, so that its gradient is summed over processes.

    trl finds a DTensor otherwise, whose `full_tensor()` gives each shard the gradient of its own process alone.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, FSDPModule) or not any(weight.requires_grad for weight in head.parameters()):
        return

    def gather(*_: Any) -> None:
        head.unshard()

    def free(module: nn.Module, *_: Any) -> None:
        if not module.training:  # else backward frees it
            head.reshard()

    model.register_forward_pre_hook(gather)
    model.register_forward_hook(free)
