"""Parts of every optimizer's step: the numbers of each step, skipping on the device, loss scaling for float16, and the
base class of optimizers that count steps on the host.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.attach import skipping_if
from portable_fsdp.config.schema import LARGEST_LOSS_SCALE, LEAST_LOSS_SCALE
from portable_fsdp.runtime.errors import ConfigError

Number = float | Tensor
"""A step's number: Python's own, or a compiled step's input."""

MakeOptimizer = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]
"""`make(groups, compiled)`: groups hold parameters under `params`; compiled: lr is a tensor, for a compiled step."""


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes nothing if the tensor `found_inf` is 1, as with torch's fused optimizers."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class CountingOptimizer(torch.optim.Optimizer):
    """Counts each parameter's steps on the host, in its state `step` if it has one, and never reads the device.

    It can skip a step on the device, as torch's fused optimizers do: a step changes nothing if the tensor `found_inf`
    is 1. The host counts such steps too; `skips` has their number on the device, and `settle_counts` subtracts it
    before a save.

    torch's `capturable` optimizers count on the device and correct by each count, which nearly doubles compile time.
    Here parameters with equal counts share the numbers computed from them; in a compiled step counts are inputs, which
    `set_step_numbers` sets.
    """

    _step_supports_amp_scaling = True
    skips_by_numbers = False
    """Whether `update` changes nothing with the numbers of a skipped step. Else `step` keeps the values, and puts them
    back."""
    barrier: Callable[[list[Tensor]], None] | None = None
    """Keeps a compiler from merging what comes before with what comes after; an engine sets it where that is faster"""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.placed: Mapping[str, Tensor] = {}
        self.skips: dict[Tensor, Tensor] = {}
        """Parameter -> number of steps counted in `step` that changed nothing, 0-dim; absent: none."""

    def prepare(self, group: dict[str, Any], count: Number, skipped: Number) -> tuple[Any, ...]:
        """Return the numbers that `update` needs for all parameters of a group whose next step is number `count`.

        `skipped`: 1 in a step that must change nothing, for `skips_by_numbers`; else 0.
        """
        return ()

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
        """Update `parameter` and its state in place; the state begins as zeros."""
        raise NotImplementedError

    def counts(self) -> dict[str, float]:
        """Name -> number of the next step on the host: its count for each parameter, and 0 skips."""
        groups = [self._by_count(group) for group in self.param_groups]
        return {f"step {count}": float(count) for group in groups for count, _ in group} | {"skips": 0.0}

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Closures are not supported."""
        found_inf, skips = cast(Tensor | None, getattr(self, "found_inf", None)), dict[int, Tensor]()
        with torch.no_grad():
            for group in self.param_groups:
                for (count, _), parameters in self._by_count(group).items():
                    known, number = self.skips.get(parameters[0], self.placed.get("skips")), count
                    if known is not None:
                        number = self.placed.get(f"step {count}", count) - known
                    prepared = self.prepare(group, number, 0.0 if found_inf is None else found_inf)
                    for parameter in parameters:
                        if parameter.grad is None:
                            continue
                        undoes = found_inf is not None and not self.skips_by_numbers
                        before = [value.clone() for value in self._changed(parameter)] if undoes else []
                        self.update(parameter, parameter.grad, group, *prepared)
                        if found_inf is not None:
                            for value, old in zip(self._changed(parameter) if undoes else [], before, strict=True):
                                value.copy_(torch.where(found_inf > 0, old, value))
                            if "step" in self.state[parameter]:  # one tensor for all with equal counts so far
                                if id(known) not in skips:
                                    skips[id(known)] = found_inf if known is None else known + found_inf
                                self.skips[parameter] = skips[id(known)]

    def settle_counts(self) -> None:
        """Subtract steps that changed nothing from the counts on the host. Waits for the device."""
        for parameter, skips in self.skips.items():
            self.state[parameter]["step"] -= skips.item()
        self.skips.clear()

    def _changed(self, parameter: Tensor) -> list[Tensor]:
        """The tensors that an update changes on the device: a parameter and its state."""
        state = self.state[parameter].items()
        return [parameter, *(value for name, value in state if isinstance(value, Tensor) and name != "step")]

    def _by_count(self, group: dict[str, Any]) -> dict[tuple[int, int], list[Tensor]]:
        """(number of the next step, from 1, id of `skips`) -> a group's parameters with equal counts so far."""
        grouped: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in group["params"]:
            steps = self.state.get(parameter, {}).get("step")
            count = 1 if steps is None else int(steps.item()) + 1
            grouped.setdefault((count, id(self.skips.get(parameter))), []).append(parameter)
        return grouped


def step_numbers(optimizer: torch.optim.Optimizer, lr: float) -> dict[str, float]:
    """Name -> number of the next step, for `set_step_numbers`: shares of `lr`, and `counts`.

    Names may change with the step; their number doesn't while the same parameters train.
    """
    rates = {f"lr * {share}": lr * share for share in map(_share, optimizer.param_groups)}
    compiled = _compiled(optimizer)
    return rates | compiled.counts() if compiled else rates


def set_step_numbers(
    optimizer: torch.optim.Optimizer, numbers: Mapping[str, float], placed: Mapping[str, Tensor]
) -> None:
    """Set the `step_numbers` of the next step; `placed` holds them as float32 device tensors.

    A compiled step reads these tensors as inputs. A copy into an old tensor would be a separate program, and a Python
    number could become part of the program.
    """
    if compiled := _compiled(optimizer):
        compiled.placed = placed
    for group in optimizer.param_groups:
        rate = f"lr * {_share(group)}"
        group["lr"] = placed[rate] if isinstance(group["lr"], Tensor) else numbers[rate]


@contextmanager
def nothing_changed_if(skipped: Tensor, optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Context of a step that changes no weight, state or step count if `skipped` (0-dim, bool) is true. Never waits.

    An optimizer that ignores `found_inf` needs memory for a second copy of weights and state meanwhile, except in a
    compiled step. Its step counts on the host of a device count skipped steps too.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    found_inf = skipped.float().to(parameters[0].device)  # waits with cpu_offload, as gradients did
    if skips_on_device(optimizer):
        with skipping_if(found_inf, optimizer):
            yield
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
    """Return the optimizer if it is our own class in a compiled step."""
    is_compiled = any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    return optimizer if is_compiled and isinstance(optimizer, CountingOptimizer) else None


def _share(group: dict[str, Any]) -> float:
    return group.get("lr_share", 1.0)  # groups made elsewhere have none


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
        """Set the state. `finite_steps`: in a row, since the scale last changed. `skipped_steps`: of the whole run."""
        self.scale = torch.tensor(scale, device=self._device)  # replaced, never changed: metrics hold them
        self._finite = torch.tensor(finite_steps, device=self._device)
        self._skipped = torch.tensor(skipped_steps, device=self._device)

    def state(self) -> dict[str, float]:
        """Return the arguments of `restore`. Waits for the device."""
        finite, skipped = int(self._finite.item()), int(self._skipped.item())
        return {"scale": self.scale.item(), "finite_steps": finite, "skipped_steps": skipped}

    def update(self, overflows: Tensor, is_empty: Tensor) -> dict[str, Tensor]:
        """Set the scale of the next step; an empty step doesn't change it.

        `overflows` (a gradient isn't finite) and `is_empty` (no label counts in the step): bool, 0-dim, equal on all
        processes. Returns metrics: the scale of this step, and the number of steps skipped so far by overflows.
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
        """Raise ConfigError for an optimizer that can't skip a step without reading `found_inf` on the host."""
        if not skips_on_device(optimizer):
            raise ConfigError(
                f"precision.compute: float16 needs an optimizer that skips a step on the device, and "
                f"{type(optimizer).__name__} can't.\n  Let its step apply found_inf (docs/optimizers.md), or set "
                "precision.compute=bfloat16 or optim.name=adamw."
            )
