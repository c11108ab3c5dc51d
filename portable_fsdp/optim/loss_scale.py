"""Dynamic loss scaling: float16 rounds gradients below 6e-8 to 0, so backward starts from a multiple of the loss."""

import torch
from torch import Tensor

from portable_fsdp.config.schema import LARGEST_LOSS_SCALE, LEAST_LOSS_SCALE
from portable_fsdp.optim.counting import skips_on_device
from portable_fsdp.runtime.errors import ConfigError

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """The rule of torch.amp.GradScaler (torch/amp/grad_scaler.py), on the device: nothing waits for it.

    The scale is multiplied by BACKOFF after a step whose gradients aren't finite, and by GROWTH after each `window` of
    finite steps, between LEAST_LOSS_SCALE and LARGEST_LOSS_SCALE. The optimizer skips the former: weights, moments and
    step counts stay as they are.
    """

    def __init__(self, scale: float, window: int, device: torch.device) -> None:
        self._window, self._device = window, device
        self.restore(scale, 0, 0)

    def restore(self, scale: float, finite_steps: int, skipped_steps: int) -> None:
        """`finite_steps`: in a row, since the scale last changed. `skipped_steps`: of the whole run."""
        self.scale = torch.tensor(scale, device=self._device)  # these are replaced, never changed: metrics hold them
        self._finite = torch.tensor(finite_steps, device=self._device)
        self._skipped = torch.tensor(skipped_steps, device=self._device)

    def state(self) -> dict[str, float]:
        """The arguments of `restore`. Waits for the device."""
        finite, skipped = int(self._finite.item()), int(self._skipped.item())
        return {"scale": self.scale.item(), "finite_steps": finite, "skipped_steps": skipped}

    def update(self, overflows: Tensor, is_empty: Tensor) -> dict[str, Tensor]:
        """Set the scale of the step after this one, which an empty step doesn't change.

        0-dim, equal on all processes: whether a gradient isn't finite, and whether nothing counts in the step. Returns
        metrics: the scale of this step, and how many steps were skipped so far since gradients overflowed.
        """
        used, finite = self.scale, self._finite + ~is_empty
        is_full = finite == self._window
        grown = torch.where(is_full, (used * GROWTH).clamp(max=LARGEST_LOSS_SCALE), used)
        self.scale = torch.where(overflows, (used * BACKOFF).clamp(min=LEAST_LOSS_SCALE), grown)
        self._finite = torch.where(overflows | is_full, 0, finite)
        self._skipped = self._skipped + overflows
        return {"loss_scale": used, "skipped_steps": self._skipped.float()}

    @staticmethod
    def require_skippable(optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError for an optimizer that can't skip a step without reading `found_inf` on the host."""
        if not skips_on_device(optimizer):
            raise ConfigError(
                f"precision.compute: float16 needs an optimizer that skips a step on the device, found "
                f"{type(optimizer).__name__}.\n  Let its step heed found_inf (docs/optimizers.md), or set "
                "precision.compute=bfloat16 or optim.name=adamw."
            )
