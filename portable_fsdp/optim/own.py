"""Optimizers that torch lacks, or whose torch version is worse: AdamW (and Adam) of a compiled step, SGD, Lion,
Adafactor, Muon, AdamW with 8-bit moments; and the user's own optimizers, tried on the host before they train.

Ours run in eager and in compiled steps; of torch's own, only AdamW and Adam are better in eager ones.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config.schema import Optim
from portable_fsdp.optim.counting import CountingOptimizer, MakeOptimizer, Number
from portable_fsdp.runtime.errors import ConfigError, PortableFSDPError
from portable_fsdp.runtime.factory import call_user, described, load_factory


def _bias_correction(beta: float, count: Number) -> Number:
    """Return 1 - beta^count; on the device by expm1, since float32 would lose digits if beta^count is about 1."""
    if isinstance(count, Tensor):
        return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
    return 1 - beta**count


def _moved(moment: Tensor, value: Tensor, share: Number) -> Tensor:
    """moment + share * (value - moment), computed in the share's dtype: a share of bfloat16 would be 1 % off."""
    if isinstance(share, Tensor) and share.dtype != moment.dtype:
        return moment.to(share.dtype).lerp(value.to(share.dtype), share).to(moment.dtype)
    return moment.lerp(value, share)


def _decay_and_subtract(parameter: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    """parameter = parameter * (1 - lr * w) - step, with the weight decay w scaled by lr as in torch's AdamW."""
    shrunk = parameter * (1 - group["lr"] * group["weight_decay"]) if group["weight_decay"] else parameter
    parameter.copy_(shrunk - step)


class AdamWNumbers(NamedTuple):
    """What `adamw_update` needs for all parameters of one group and count. In a skipped step nothing moves."""

    shrink: Number  # of the parameter by weight decay
    size: Number  # of the update
    root: Number  # of the second moment's correction
    shares: tuple[Number, Number]  # by which the moments move to the new gradient
    skips: Tensor | None  # bool: whether the step is skipped; None: it isn't


def adamw_numbers(group: dict[str, Any], count: Number, skipped: Number = 0.0) -> AdamWNumbers:
    """Return the numbers of a step, the `count`-th of its parameters; `skipped` is 1 if it must change nothing."""
    (beta1, beta2), moves = group["betas"], 1 - skipped
    first, second = _bias_correction(beta1, count), _bias_correction(beta2, count)
    return AdamWNumbers(
        shrink=1 - group["lr"] * group["weight_decay"] * moves,
        size=group["lr"] * moves / first,
        root=second**0.5,
        shares=((1 - beta1) * moves, (1 - beta2) * moves),
        skips=skipped > 0 if isinstance(skipped, Tensor) else None,
    )


def adamw_update(
    state: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    group: dict[str, Any],
    numbers: AdamWNumbers,
    barrier: Callable[[list[Tensor]], None] | None = None,
) -> None:
    """Apply AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), as torch does.

    m = b1 * m + (1 - b1) * gradient; v = b2 * v + (1 - b2) * gradient^2; in the t-th step of a parameter
    parameter = parameter * (1 - lr * w) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
    Without the group's `decoupled` it is torch's Adam: w * parameter is added to the gradient.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    decoupled, (first, second) = group.get("decoupled", True), numbers.shares
    if numbers.skips is not None:  # 0 * inf isn't 0
        gradient = gradient.masked_fill(numbers.skips, 0.0)
    if group["weight_decay"] and not decoupled:
        gradient = gradient + group["weight_decay"] * parameter
    # torch traces an operation in place in Python: 0.1 to 0.5 ms for each weight in a step of XLA; a copy 0.01 ms.
    mean = _moved(state["exp_avg"], gradient, first)
    square = _moved(state["exp_avg_sq"], gradient.square(), second)
    if barrier is not None:
        barrier([mean, square])
    state["exp_avg"].copy_(mean)
    state["exp_avg_sq"].copy_(square)
    update = numbers.size * mean / (square.sqrt() / numbers.root + group["eps"])
    shrunk = parameter * numbers.shrink if group["weight_decay"] and decoupled else parameter
    parameter.copy_(shrunk - update)


class AdamW(CountingOptimizer):
    """AdamW, or Adam (without `decoupled`), for a compiled step."""

    skips_by_numbers = True

    def prepare(self, group: dict[str, Any], count: Number, skipped: Number) -> tuple[Any, ...]:
        return (adamw_numbers(group, count, skipped),)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
        adamw_update(self.state[parameter], parameter, gradient, group, prepared[0], self.barrier)


class SGD(CountingOptimizer):
    """SGDW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 1), weight decay w scaled by lr as in torch's AdamW:
    b = m * b + gradient; parameter = parameter * (1 - lr * w) - lr * b.

    torch's SGD couples the decay to the gradient, and reads a device's learning rate back to the host in each step.
    """

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            gradient = state["momentum_buffer"] * group["momentum"] + gradient
            state["momentum_buffer"].copy_(gradient)
        _decay_and_subtract(parameter, gradient * group["lr"], group)


class Lion(CountingOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2), weight decay w scaled by lr:
    parameter = parameter * (1 - lr * w) - lr * sign(b1 * m + (1 - b1) * gradient); m = b2 * m + (1 - b2) * gradient.
    """

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        sign = state["exp_avg"].lerp(gradient, 1 - beta1).sign()
        _decay_and_subtract(parameter, sign * group["lr"], group)
        state["exp_avg"].copy_(state["exp_avg"].lerp(gradient, 1 - beta2))


# ----------------------------------------------------------------------------------------------------------- Adafactor


ADAFACTOR_EPS = 1e-30  # the paper's first epsilon


class Adafactor(CountingOptimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5) with the learning rate of the schedule.

    It equals transformers' with scale_parameter=False and relative_step=False, as its Trainer sets: no first moment, no
    step relative to the weights. With k = t^-0.8 in the t-th step of a parameter, R and C (state `exp_avg_sq_row`,
    `exp_avg_sq_col`) move by k towards the means of gradient^2 + 1e-30 over columns and rows of the last two
    dimensions; u = gradient / sqrt(R C / mean(R)); parameter = parameter * (1 - lr * w) - lr * u / max(1, rms(u)).
    Vectors keep the full second moment. torch's Adafactor reads the norm of each parameter back to the host.
    """

    def prepare(self, group: dict[str, Any], count: Number, skipped: Number) -> tuple[Any, ...]:
        return (count**-0.8,)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
        state, (share,) = self.state[parameter], prepared
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: gradient.new_zeros(shape) for name, shape in _shapes(parameter).items()}
        state["step"] += 1
        square = gradient.square() + ADAFACTOR_EPS
        if parameter.dim() >= 2:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            rows.copy_(rows + (_mean_by_sum(square, -1) - rows) * share)
            columns.copy_(columns + (_mean_by_sum(square, -2) - columns) * share)
            root = (rows / _mean_by_sum(rows, -1)[..., None]).rsqrt()[..., None] * columns.rsqrt()[..., None, :]
        else:
            mean = state["exp_avg_sq"] + (square - state["exp_avg_sq"]) * share
            state["exp_avg_sq"].copy_(mean)
            root = mean.rsqrt()
        update = gradient * root
        rms = (update.square().sum() / update.numel()).sqrt()
        _decay_and_subtract(parameter, update * (group["lr"] / rms.clamp(min=1.0)), group)


def _shapes(parameter: Tensor) -> dict[str, list[int]]:
    shape = list(parameter.shape)
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": [*shape[:-2], shape[-1]]}


def _mean_by_sum(tensor: Tensor, dim: int) -> Tensor:
    """Compute the mean by a sum: DTensor's mean over uneven shards would weigh all processes equally."""
    return tensor.sum(dim) / tensor.shape[dim]


# ---------------------------------------------------------------------------------------------------------------- Muon


COEFFICIENTS, ITERATIONS, MUON_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # Jordan's, and torch.optim.Muon's


class Muon(CountingOptimizer):
    """Muon (Jordan et al., kellerjordan.github.io/posts/muon) for groups with `is_hidden`, AdamW for the others.

    It is torch.optim.Muon(adjust_lr_fn="match_rms_adamw") (Liu et al., arXiv 2502.16982), so that one learning rate and
    one weight decay w serve both: m = b * m + (1 - b) * gradient; O = orthogonal((1 - b) * gradient + b * m);
    parameter = parameter * (1 - lr * w) - lr * 0.2 * sqrt(max(rows, columns)) * O.

    torch's Muon always iterates in bfloat16: its rounding, and so the loss curve, would depend on the devices. It also
    reads a device's learning rate back to the host. Here the iteration has the dtype `compute` of the group.
    """

    def prepare(self, group: dict[str, Any], count: Number, skipped: Number) -> tuple[Any, ...]:
        return () if group.get("is_hidden") else (adamw_numbers(group, count),)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
        state = self.state[parameter]
        if not group.get("is_hidden"):
            adamw_update(state, parameter, gradient, group, prepared[0])
            return
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp(gradient, 1 - group["momentum"])
        state["momentum_buffer"].copy_(mean)
        orthogonal = orthogonalized(gradient.lerp(mean, group["momentum"]), group["compute"])
        _decay_and_subtract(parameter, orthogonal * (group["lr"] * (0.2 * max(parameter.shape) ** 0.5)), group)


def orthogonalized(matrix: Tensor, compute: torch.dtype) -> Tensor:
    """Return the nearest matrix with singular values near 1 (0.7 to 1.2), by Newton-Schulz iteration in `compute`."""
    a, b, c = COEFFICIENTS
    # Not torch's norm: squares and one sum are the same over shards, and in XLA.
    x = (matrix / matrix.square().sum().sqrt().clamp(min=MUON_EPS)).to(compute)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


# ----------------------------------------------------------------------------------------------------- AdamW in 8 bits


BLOCK, SMALLEST = 256, 4096  # values per scale, and in the smallest quantised tensor, as in bitsandbytes


def from_bitsandbytes(optim: Optim) -> Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]:
    """Implement `make_optimizer` for optim.name=adamw8bit. Raises ConfigError without bitsandbytes."""
    try:
        from bitsandbytes.functional import create_dynamic_map
    except ImportError as error:
        raise ConfigError(
            f"optim.name=adamw8bit: can't import the package bitsandbytes: {error}.\n"
            "  pip install bitsandbytes, or set optim.name=adamw."
        ) from None
    maps: list[Tensor] = [create_dynamic_map(signed=signed) for signed in (True, False)]
    return lambda groups, _: AdamW8bit(groups, maps, lr=optim.lr, betas=optim.betas, eps=optim.eps)


class AdamW8bit(AdamW):
    """AdamW with block-wise quantised moments (Dettmers et al., arXiv 2110.02861).

    The state of a tensor is the same on any number of devices. If a row of dimension 0 is whole blocks of 256 values,
    and the tensor has at least 4096, `exp_avg` and `exp_avg_sq` are uint8 codes in its shape, and `exp_avg_scale`,
    `exp_avg_sq_scale` `[rows, blocks of a row]` float32: the largest magnitude of each block. Other tensors have
    AdamW's own state. (bitsandbytes' own optimizer forms blocks within a device's shard.)
    """

    skips_by_numbers = False  # each update rounds the moments again

    def __init__(self, groups: list[dict[str, Any]], maps: list[Tensor], **options: Any) -> None:
        super().__init__(groups, **options)
        self._maps = {torch.device("cpu"): maps}

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Any) -> None:
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
        # No block crosses a row, and processes hold whole rows: each updates its own.
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
    """Return this process's part of a tensor."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


# ------------------------------------------------ the user's own optimizers, tried on the host before they train


def from_factory(optim: Optim, name: str) -> MakeOptimizer:
    """Implement `make_optimizer` for a `function(groups, lr)`; lr is a number, or in compiled steps a float32 tensor.

    Raises ConfigError for a function that can't be used, and for an optimizer with state that a checkpoint can't hold
    or that doesn't start at zero, or that ignores `lr` or `weight_decay` of its groups. Trials of two steps on small
    tensors detect these.
    """
    function = load_factory("optim.factory", name)

    def make(groups: list[dict[str, Any]], compiled: bool) -> torch.optim.Optimizer:
        lr = torch.tensor(optim.lr) if compiled else optim.lr
        optimizer: object = call_user(f"optim.factory: {name}", function, groups, lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            actual = type(optimizer).__name__
            raise ConfigError(f"optim.factory: expected {name} to return a torch.optim.Optimizer, found {actual}.")
        return optimizer

    if problem := _problem(lambda **changes: _trial(make, name, **changes), decays=optim.weight_decay > 0):
        raise ConfigError(f"optim.factory: {name}: {problem}.")
    return make


class Trial(NamedTuple):
    weights: list[Tensor]
    states: list[dict[str, Any]]  # of each weight
    group: dict[str, Any]


def _problem(run: Callable[..., Trial], *, decays: bool) -> str:
    """The reason why the optimizer can't train here; empty if it can. Engines allocate all state as zeros first."""
    plain = run()
    own = {key: value for state in plain.states for key, value in state.items() if value is not None}
    if others := sorted(key for key, value in own.items() if not isinstance(value, Tensor)):
        return f"{others} of its state aren't tensors, which a checkpoint can't hold. Make them tensors"
    if counted := sorted(key for key, value in run(steps=1).group.items() if value != plain.group[key]):
        return f"a step changes {counted} of its groups. Keep them in the state, as tensors"
    zeroed = run(zeros=plain.states)
    if not _equal(zeroed.weights, plain.weights):
        pairs = [(a, b) for a, b in zip(plain.states, zeroed.states, strict=True)]
        differ = sorted({key for a, b in pairs for key in a if not _equal([a[key]], [b[key]])})
        return f"{differ or sorted(own)} of its state doesn't start at zero. Let it start at zero"
    if _equal(run(lr=1e-3).weights, plain.weights):
        return "its step ignores `lr` of its groups. Read it in each step"
    if decays and _equal(run(weight_decay=0.0).weights, plain.weights):
        return "`weight_decay` of its groups has no effect. Read it in each step, or set optim.weight_decay=0"
    return ""


def _trial(
    make: MakeOptimizer,
    name: str,
    *,
    steps: int = 2,
    lr: float = 1e-2,
    weight_decay: float = 0.25,
    zeros: list[dict[str, Any]] | None = None,
) -> Trial:
    """Run some steps on small tensors. `zeros`: start with zeros in the shapes and dtypes of this state."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,))]
    try:
        optimizer = make([{"params": list(weights), "weight_decay": weight_decay, "lr_share": 1.0}], False)
        optimizer.param_groups[0]["lr"] = lr
        for weight, state in zip(weights, zeros or [], strict=False):
            optimizer.state[weight] = {
                key: torch.zeros_like(value) for key, value in state.items() if value is not None
            }
        for _ in range(steps):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    except PortableFSDPError:
        raise
    except Exception as error:
        raise ConfigError(f"optim.factory: a step of {name} failed: {described(error)}") from error
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return Trial([weight.detach() for weight in weights], [dict(optimizer.state[weight]) for weight in weights], group)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
