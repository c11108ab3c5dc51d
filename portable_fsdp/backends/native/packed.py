"""Copy metrics from a device to the host as one vector: one copy, and on TPUs one program."""

from collections.abc import Callable

import torch
from torch import Tensor

from portable_fsdp.backends import contract


def fetch_packed(metrics: contract.Metrics) -> contract.Pending:
    """Implement `Backend.fetch` for metrics on one device; the result is float32."""
    sizes = {name: value.shape for name, value in metrics.items()}
    values = torch.cat([value.float().flatten() for value in metrics.values()])
    read = _copy_beside(values) if values.is_cuda else values.cpu

    def result() -> dict[str, Tensor]:
        parts = read().split([size.numel() for size in sizes.values()])
        return {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}

    return contract.Pending(result)


def _copy_beside(values: Tensor) -> Callable[[], Tensor]:
    """Start a copy from a GPU that overlaps compute; the returned function waits for it."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()

    def read() -> Tensor:
        ready.synchronize()
        return host

    return read
