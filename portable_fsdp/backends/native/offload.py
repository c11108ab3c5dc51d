"""Keep the inputs of recomputed layers in host memory until backward (`memory.offload: activations`).

A separate stream copies each to the host during forward, and back while the next layer runs backward. The last
layer keeps its input: backward begins there. On a CPU nothing is copied.
"""

# The hooks that are active, and a tensor's version, have no public name.
# pyright: reportPrivateUsage=false

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from portable_fsdp.backends.native.units import require_unchanged
from portable_fsdp.backends.nested import grad_tensors


class _HostCopy:
    """A tensor on the host, and the copy made before it, whose layer runs backward next."""

    def __init__(self, tensor: Tensor, stream: "torch.cuda.Stream | None", before: "_HostCopy | None") -> None:
        self._device, self._stream, self._arrival = tensor.device, stream, cast("Tensor | None", None)
        self._before = None if before is None else ref(before)
        self._counter, self._version = tensor.detach(), tensor._version
        self._counter.data = tensor.new_empty(0)  # still shares the count of in-place changes, not the memory
        self.total_bytes = tensor.nbytes + (before.total_bytes if before else 0)
        if stream is None:
            self._host = tensor.to("cpu")
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def start_return(self) -> None:
        if self._arrival is None:
            with torch.cuda.stream(self._stream):
                self._arrival = self._host.to(self._device, non_blocking=True)

    def returned(self) -> Tensor:
        """Return the tensor on the device, and start the copy of the one before. Raises BackendError if it changed."""
        require_unchanged(self._counter, self._version, self._host.shape)
        self.start_return()
        tensor, self._arrival = cast(Tensor, self._arrival), None
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self._stream)
            tensor.record_stream(stream)
        before = self._before and self._before()
        if before:
            before.start_return()
        return tensor


class ActivationOffload:
    """Offloads the activations of one model on one device. `host_bytes`: the peak on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: Callable[[], _HostCopy | None] = lambda: None
        self.host_bytes = 0

    def wrap(self, layers: list[nn.Module]) -> None:
        """Offload the inputs of recomputed `layers`, given in the order in which they run."""
        for layer in layers[:-1]:
            layer.forward = partial(self._run, layer.forward)

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Masks and rotary embeddings, which all layers share, need no gradient.
        inputs = {tensor.untyped_storage()._cdata for tensor in grad_tensors((args, kwargs))}
        # Inner hooks replace outer ones: pass tensors that aren't ours to the outer ones.
        outer = cast(Any, torch)._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            if tensor.untyped_storage()._cdata not in inputs:
                return partial(outer[1], outer[0](tensor)) if outer else tensor
            kept = _HostCopy(tensor, self._stream, self._last())
            self._last, self.host_bytes = ref(kept), max(self.host_bytes, kept.total_bytes)
            return kept.returned

        with saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, Tensor) else packed()):
            return forward(*args, **kwargs)
