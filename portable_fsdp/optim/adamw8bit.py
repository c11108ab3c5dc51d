"""AdamW whose moments rest in 8 bits, by the kernels of bitsandbytes (native only)."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.config.schema import Optim
from portable_fsdp.optim.counting import AdamW, Number
from portable_fsdp.runtime.errors import ConfigError

BLOCK, SMALLEST = 256, 4096  # values of one scale, and of the smallest tensor that is quantised: bitsandbytes' own


def from_bitsandbytes(optim: Optim) -> Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]:
    """`make_optimizer` for optim.name=adamw8bit. Raises ConfigError without bitsandbytes."""
    try:
        from bitsandbytes.functional import create_dynamic_map
    except ImportError as error:
        raise ConfigError(
            f"optim.name=adamw8bit: expected the package bitsandbytes, found {error}.\n"
            "  pip install bitsandbytes, or set optim.name=adamw."
        ) from None
    maps: list[Tensor] = [create_dynamic_map(signed=signed) for signed in (True, False)]
    return lambda groups, _: AdamW8bit(groups, maps, lr=optim.lr, betas=optim.betas, eps=optim.eps)


class AdamW8bit(AdamW):
    """AdamW with block-wise quantised moments (Dettmers et al., arXiv 2110.02861).

    The state of a tensor is the same on any number of devices. Where a row of dimension 0 is whole blocks of 256
    values, and the tensor has at least 4096, `exp_avg` and `exp_avg_sq` are uint8 codes in its shape, and
    `exp_avg_scale`, `exp_avg_sq_scale` `[rows, blocks of a row]` float32: the largest magnitude of each block. Other
    tensors have AdamW's own state. (bitsandbytes' own optimizer cuts blocks from what a device holds.)
    """

    def __init__(self, groups: list[dict[str, Any]], maps: list[Tensor], **options: Any) -> None:
        super().__init__(groups, **options)
        self._maps = {torch.device("cpu"): maps}

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        rows, values = parameter.shape[0] if parameter.dim() else 1, parameter.numel()
        if parameter.dim() < 2 or values < SMALLEST or values // rows % BLOCK:
            super().update(parameter, gradient, group, *prepared)
            return
        state, names = self.state[parameter], ("exp_avg", "exp_avg_sq")
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in names}
            scales = [rows, values // rows // BLOCK]
            state |= {f"{name}_scale": gradient.new_zeros(scales, dtype=torch.float32) for name in names}
        state["step"] += 1
        # No block crosses a row, and processes hold rows: each updates what it holds.
        local = {name: _local(value) for name, value in state.items()}
        parameter, gradient = _local(parameter), _local(gradient)
        if not parameter.numel():
            return
        if parameter.device not in self._maps:
            self._maps[parameter.device] = [values.to(parameter.device) for values in self._maps[torch.device("cpu")]]
        (first, second), (mean, square) = self._maps[parameter.device], (local[f"{name}_scale"] for name in names)
        cast(Any, torch).ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", gradient, parameter, local["exp_avg"], local["exp_avg_sq"], *group["betas"], 0.0, 0.0,
            group["eps"], int(state["step"].item()), group["lr"], first, second, mean.view(-1), square.view(-1),
            group["weight_decay"], 1.0, False,
        )  # fmt: skip


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor
