"""Python values over torch's process group, for the engines that have one."""

from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from portable_fsdp.backends.base import Part

T = TypeVar("T")


def broadcast(value: T, process: Part, device: torch.device | None = None) -> T:
    """Process 0's value on all. `device`: through which it travels; None: the group's own choice."""
    if process.count == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    return cast(T, box[0])


def gather(value: T, process: Part) -> list[T]:
    """Every process's value, in their order, on all."""
    if process.count == 1:
        return [value]
    boxes: list[Any] = [None] * process.count
    dist.all_gather_object(boxes, value)
    return cast(list[T], boxes)
