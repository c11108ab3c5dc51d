"""What every optimizer's step needs: the numbers of each step, steps that are skipped on the device, loss scaling for
float16, and the base of optimizers that count steps on the host.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.config.schema import LARGEST_LOSS_SCALE, LEAST_LOSS_SCALE
from portable_fsdp.runtime.errors import ConfigError

Number = float | Tensor
"""A step's number: Python's own, or a compiled step's input."""

Make = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]
"""(groups, whether a compiled step runs it) -> an optimizer."""


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes nothing where the tensor `found_inf` is 1, as that of torch's fused optimizers."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class CountingOptimizer(torch.optim.Optimizer):
    """Counts each parameter's steps on the host, in its state `step` if it has one, and reads nothing of the device.

    It can skip a step on the device, as torch's fused optimizers do: a step changes nothing where the tensor
    `found_inf` is 1. The host counts such steps too; `skips` has their number on the device, and `settle_counts`
    subtracts it before a save.

    torch's `capturable` optimizers count on the device and correct by each count, which nearly doubles compile time.
    Here parameters of equal counts share what follows from them; in a compiled step counts are inputs, which
    `set_step_numbers` sets.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.placed: Mapping[str, Tensor] = {}
        self.skips: dict[Tensor, Tensor] = {}
        """Parameter -> how many of the steps that `step` counts changed nothing, 0-dim; absent: none."""

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        """What `update` takes for all parameters of one group whose next step is number `count`."""
        return ()

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        """Change `parameter` and its state, which begins as zeros."""
        raise NotImplementedError

    def counts(self) -> dict[str, float]:
        """What the host knows of the next step by name: the number that it has for each parameter, and 0 skips."""
        groups = [self._by_count(group) for group in self.param_groups]
        return {f"step {count}": float(count) for group in groups for count, _ in group} | {"skips": 0.0}

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. There is no closure: nothing here evaluates a loss again."""
        found_inf, skips = cast(Tensor | None, getattr(self, "found_inf", None)), dict[int, Tensor]()
        with torch.no_grad():
            for group in self.param_groups:
                for (count, _), parameters in self._by_count(group).items():
                    known, number = self.skips.get(parameters[0], self.placed.get("skips")), count
                    if known is not None:
                        number = self.placed.get(f"step {count}", count) - known
                    prepared = self.prepare(group, number)
                    for parameter in parameters:
                        if parameter.grad is None:
                            continue
                        before = [] if found_inf is None else [value.clone() for value in self._changed(parameter)]
                        self.update(parameter, parameter.grad, group, *prepared)
                        if found_inf is not None:
                            for value, old in zip(self._changed(parameter), before, strict=True):
                                value.copy_(torch.where(found_inf > 0, old, value))
                            if "step" in self.state[parameter]:  # one tensor for all that counted alike so far
                                if id(known) not in skips:
                                    skips[id(known)] = found_inf if known is None else known + found_inf
                                self.skips[parameter] = skips[id(known)]

    def settle_counts(self) -> None:
        """Take steps that changed nothing out of the counts on the host. Waits for the device."""
        for parameter, skips in self.skips.items():
            self.state[parameter]["step"] -= skips.item()
        self.skips.clear()

    def _changed(self, parameter: Tensor) -> list[Tensor]:
        """What an update changes on the device: a parameter and its state."""
        state = self.state[parameter].items()
        return [parameter, *(value for name, value in state if isinstance(value, Tensor) and name != "step")]

    def _by_count(self, group: dict[str, Any]) -> dict[tuple[int, int], list[Tensor]]:
        """A group's parameters that counted alike so far, by the number of their next step, from 1, and `skips`."""
        grouped: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in group["params"]:
            steps = self.state.get(parameter, {}).get("step")
            count = 1 if steps is None else int(steps.item()) + 1
            grouped.setdefault((count, id(self.skips.get(parameter))), []).append(parameter)
        return grouped


def step_numbers(optimizer: torch.optim.Optimizer, lr: float) -> dict[str, float]:
    """The host's numbers of the next step by name, for `set_step_numbers`: shares of `lr`, and `counts`.

    Names may change with the step; how many there are doesn't while the same parameters train.
    """
    rates = {_rate(group): lr * _share(group) for group in optimizer.param_groups}
    compiled = _compiled(optimizer)
    return rates | compiled.counts() if compiled else rates


def set_step_numbers(
    optimizer: torch.optim.Optimizer, numbers: Mapping[str, float], placed: Mapping[str, Tensor]
) -> None:
    """Set the `step_numbers` of the next step; `placed` holds them as float32 tensors of the device.

    A compiled step reads these tensors as inputs. A copy into an old tensor would be a separate program, and a number
    of Python could become part of the program.
    """
    if compiled := _compiled(optimizer):
        compiled.placed = placed
    for group in optimizer.param_groups:
        rate = _rate(group)
        group["lr"] = placed[rate] if isinstance(group["lr"], Tensor) else numbers[rate]


@contextmanager
def nothing_changed_if(skipped: Tensor, optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Around a step, which changes no weight, state or step count where `skipped` (0-dim, bool) is true. Never waits.

    An optimizer that doesn't heed `found_inf` needs memory for a second copy of weights and state meanwhile, except in
    a compiled step. Step counts that it keeps on the host of a device count skipped steps too.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    found_inf = skipped.float().to(parameters[0].device)  # waits with cpu_offload, as gradients did
    if skips_on_device(optimizer):
        cast(Any, optimizer).found_inf = found_inf
        yield
        del cast(Any, optimizer).found_inf  # else it would hold for steps of the user's own too
        return

    def changed() -> dict[tuple[Tensor, str], Tensor]:
        trained = [p for p in parameters if p.grad is not None]
        values = {(p, name): value for p in trained for name, value in {"": p, **optimizer.state[p]}.items()}
        return {key: t for key, t in values.items() if isinstance(t, Tensor) and t.device == found_inf.device}

    with torch.no_grad():
        before = {key: value.clone() for key, value in changed().items()}
        yield
        for key, value in changed().items():  # state begins as zeros
            value.copy_(torch.where(found_inf > 0, before.get(key, torch.zeros_like(value)), value))


def _compiled(optimizer: torch.optim.Optimizer) -> CountingOptimizer | None:
    """The optimizer, if it is one of ours in a compiled step."""
    is_compiled = any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    return optimizer if is_compiled and isinstance(optimizer, CountingOptimizer) else None


def _share(group: dict[str, Any]) -> float:
    return group.get("lr_share", 1.0)  # groups that others made have none


def _rate(group: dict[str, Any]) -> str:
    return f"lr * {_share(group)}"


# ------------------------------------------------------------------------------------------------------------- float16


GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """Dynamic loss scaling: float16 rounds gradients below 6e-8 to 0, so backward starts from a multiple of the loss.

    The rule of torch.amp.GradScaler (torch/amp/grad_scaler.py), on the device: nothing waits for it.

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
