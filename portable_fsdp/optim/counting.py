"""Optimizers that count steps on the host: their base, AdamW (and Adam), SGD, Lion, Adafactor, Muon, and
AdamW with moments in 8 bits.

They run in eager and in compiled steps; of torch's own, only AdamW and Adam do better in eager ones.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.config.schema import Optim
from portable_fsdp.runtime.errors import ConfigError

Number = float | Tensor
"""A step's number: Python's own, or a compiled step's input."""


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


def adamw_prepare(group: dict[str, Any], count: Number) -> tuple[Number, ...]:
    """What `adamw_update` takes for all parameters of one group and count."""
    first, second = (_bias_correction(beta, count) for beta in group["betas"])
    return 1 - group["lr"] * group["weight_decay"], group["lr"] / first, second**0.5


def _bias_correction(beta: float, count: Number) -> Number:
    """1 - beta^count; on the device without the digits that float32 would lose where beta^count is about 1."""
    if isinstance(count, Tensor):
        return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
    return 1 - beta**count


def adamw_update(
    state: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    group: dict[str, Any],
    prepared: tuple[Number, ...],
    decoupled: bool = True,
) -> None:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), as torch's.

    m = b1 * m + (1 - b1) * gradient; v = b2 * v + (1 - b2) * gradient^2; in the t-th step of a parameter
    parameter = parameter * (1 - lr * w) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
    Not `decoupled` it is torch's Adam: w * parameter is added to the gradient.
    """
    (beta1, beta2), (shrink, size, root) = group["betas"], prepared
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    if group["weight_decay"] and not decoupled:
        gradient = gradient + group["weight_decay"] * parameter
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if group["weight_decay"] and decoupled:
        parameter.mul_(shrink)
    parameter.sub_(size * mean / (square.sqrt() / root + group["eps"]))


class AdamW(CountingOptimizer):
    """AdamW, or Adam, for a compiled step."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: Number,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool = True,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._decoupled = decoupled

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        return adamw_prepare(group, count)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        adamw_update(self.state[parameter], parameter, gradient, group, prepared, self._decoupled)


class SGD(CountingOptimizer):
    """SGDW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 1), weight decay w scaled by lr as in torch's AdamW:
    b = m * b + gradient; parameter = parameter * (1 - lr * w) - lr * b.

    torch's SGD couples the decay to the gradient, and reads a device's learning rate back to the host in each step.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: Number, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(gradient * group["lr"])


class Lion(CountingOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2), weight decay w scaled by lr:
    parameter = parameter * (1 - lr * w) - lr * sign(b1 * m + (1 - b1) * gradient); m = b2 * m + (1 - b2) * gradient.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: Number, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        sign = state["exp_avg"].lerp(gradient, 1 - beta1).sign()
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(sign * group["lr"])
        state["exp_avg"].lerp_(gradient, 1 - beta2)


# ----------------------------------------------------------------------------------------------------------- Adafactor


ADAFACTOR_EPS = 1e-30  # the paper's first epsilon


class Adafactor(CountingOptimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5) with the learning rate of the schedule.

    That is transformers' with scale_parameter=False and relative_step=False, as its Trainer has it: no first moment, no
    step relative to the weights. With k = t^-0.8 in the t-th step of a parameter, R and C (state `exp_avg_sq_row`,
    `exp_avg_sq_col`) move by k towards the means of gradient^2 + 1e-30 over columns and rows of the last two
    dimensions; u = gradient / sqrt(R C / mean(R)); parameter = parameter * (1 - lr * w) - lr * u / max(1, rms(u)).
    Vectors have the whole second moment. torch's reads the norm of each parameter back to the host.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: Number) -> None:
        super().__init__(groups, {"lr": lr})

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        return (count**-0.8,)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        state, (share,) = self.state[parameter], prepared
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: gradient.new_zeros(shape) for name, shape in _shapes(parameter).items()}
        state["step"] += 1
        square = gradient.square() + ADAFACTOR_EPS
        if parameter.dim() >= 2:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            rows.add_((_mean_by_sum(square, -1) - rows) * share)
            columns.add_((_mean_by_sum(square, -2) - columns) * share)
            root = (rows / _mean_by_sum(rows, -1)[..., None]).rsqrt()[..., None] * columns.rsqrt()[..., None, :]
        else:
            root = state["exp_avg_sq"].add_((square - state["exp_avg_sq"]) * share).rsqrt()
        update = gradient * root
        rms = (update.square().sum() / update.numel()).sqrt()
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update * (group["lr"] / rms.clamp(min=1.0)))


def _shapes(parameter: Tensor) -> dict[str, list[int]]:
    shape = list(parameter.shape)
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": [*shape[:-2], shape[-1]]}


def _mean_by_sum(tensor: Tensor, dim: int) -> Tensor:
    """The mean by a sum: DTensor's mean over uneven shards would weigh each process alike."""
    return tensor.sum(dim) / tensor.shape[dim]


# ---------------------------------------------------------------------------------------------------------------- Muon


COEFFICIENTS, ITERATIONS, MUON_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # Jordan's, and torch.optim.Muon's


class Muon(CountingOptimizer):
    """Muon (Jordan et al., kellerjordan.github.io/posts/muon) of groups with `is_hidden`, AdamW of the others.

    It is torch.optim.Muon(adjust_lr_fn="match_rms_adamw") (Liu et al., arXiv 2502.16982), so that one learning rate and
    one weight decay w serve both: m = b * m + (1 - b) * gradient; O = orthogonal((1 - b) * gradient + b * m);
    parameter = parameter * (1 - lr * w) - lr * 0.2 * sqrt(max(rows, columns)) * O.

    torch's iterates in bfloat16 always, and so its rounding, hence the loss curve, would depend on the devices. It also
    reads a device's learning rate back to the host. Here the iteration has the dtype `compute`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: Number,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        compute: torch.dtype,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "is_hidden": False}
        super().__init__(groups, defaults)
        self._compute = compute

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        return () if group["is_hidden"] else adamw_prepare(group, count)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        state = self.state[parameter]
        if not group["is_hidden"]:
            adamw_update(state, parameter, gradient, group, prepared)
            return
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        orthogonal = orthogonalized(gradient.lerp(mean, group["momentum"]), self._compute)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(orthogonal * (group["lr"] * (0.2 * max(parameter.shape) ** 0.5)))


def orthogonalized(matrix: Tensor, compute: torch.dtype) -> Tensor:
    """The nearest matrix with singular values near 1 (0.7 to 1.2), by Newton and Schulz's iteration in `compute`."""
    a, b, c = COEFFICIENTS
    # A norm of its own: squares and one sum are the same over shards, and in XLA.
    x = (matrix / matrix.square().sum().sqrt().clamp(min=MUON_EPS)).to(compute)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


# ----------------------------------------------------------------------------------------------------- AdamW in 8 bits


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
