"""Groups of parameters, the optimizer that the config names, and the numbers of each step.

A backend makes the optimizer once its parameters are laid out: `make_optimizer` gives it the function to call. The loop
tells it the numbers of each step (`step_numbers`, `set_step_numbers`): a compiled step takes them as inputs.
"""

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config.describe import matching
from portable_fsdp.config.schema import LARGEST_LOSS_SCALE, LEAST_LOSS_SCALE, Optim, OptimGroup
from portable_fsdp.optim.counting import (
    SGD,
    Adafactor,
    AdamW,
    CountingOptimizer,
    Lion,
    Muon,
    from_bitsandbytes,
    skips_on_device,
)
from portable_fsdp.runtime.errors import ConfigError, PortableFSDPError
from portable_fsdp.runtime.factory import call_user, described, load_factory

Make = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]


def parameter_groups(
    named_shapes: Mapping[str, tuple[int, ...]],
    optim: Optim,
    *,
    ties: Mapping[str, str] | None = None,
    frozen: Collection[str] = (),
    tables: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The parameters that train, by what an update does to them; no group is empty.

    A group's `params` are FQNs in the order of `named_shapes`. The first of `optim.groups` that matches gives
    `weight_decay` and `lr_share` (its learning rate as a share of the schedule's). By default tensors of two or more
    dimensions decay, embedding tables included; biases and norm weights don't. `ties`: further FQN of a tied weight ->
    its first; any of them may match. `frozen`: FQNs of weights that don't train. Where optim.name is muon, `is_hidden`
    marks the groups of matrices that aren't `tables` (embeddings and the head). Raises ConfigError for a group of
    `optim.groups` that takes nothing.
    """
    first = {fqn: fqn for fqn in (*named_shapes, *frozen)} | dict(ties or {})
    own = _own_group(first, named_shapes.keys(), optim)
    grouped: dict[tuple[float, float, bool], list[str]] = {}
    for fqn, shape in named_shapes.items():
        group = own.get(fqn, OptimGroup(match=fqn))
        default = optim.weight_decay if len(shape) >= 2 else 0.0
        decay = default if group.weight_decay is None else group.weight_decay
        share = 1.0 if group.lr is None else group.lr / optim.lr
        is_hidden = optim.name == "muon" and len(shape) == 2 and fqn not in tables
        grouped.setdefault((decay, share, is_hidden), []).append(fqn)
    return [
        {"params": fqns, "weight_decay": decay, "lr_share": share} | ({"is_hidden": True} if is_hidden else {})
        for (decay, share, is_hidden), fqns in grouped.items()
    ]


def _own_group(first: Mapping[str, str], trained: Collection[str], optim: Optim) -> dict[str, OptimGroup]:
    """Trained FQN -> the first of `optim.groups` that matches it; `first`: FQN -> the first one of its weight."""
    own: dict[str, OptimGroup] = {}
    for index, group in enumerate(optim.groups):
        key = f"optim.groups[{index}].match"
        names = list(dict.fromkeys(first[fqn] for fqn in matching(key, group.match, first)))
        trains = [fqn for fqn in names if fqn in trained]
        if not trains:
            raise ConfigError(
                f"{key}: expected a pattern that names parameters which train, found {group.match!r}: all that it "
                f"names, {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, is frozen by model.freeze.\n"
                "  Leave the group out, or freeze less."
            )
        if own.keys() >= set(trains):
            raise ConfigError(
                f"{key}: expected a pattern that names parameters which no earlier group has taken, found "
                f"{group.match!r}.\n  The first group that matches counts: put this one before."
            )
        own = dict.fromkeys(trains, group) | own
    return own


def make_optimizer(optim: Optim, compute: torch.dtype = torch.float32) -> Make:
    """`make(groups, compiled)`, which makes the config's optimizer from groups of parameters.

    A compiled step may hold no number that changes with the step: lr is then a float32 tensor, and AdamW the one of
    counting.py, whose state has the names, shapes and dtypes of torch's. `compute`: the dtype of Muon's iteration.
    Raises ConfigError for a package that is missing, and for a factory that can't be used.
    """
    if optim.factory is not None:
        return from_factory(optim, optim.factory)
    if optim.name == "adamw8bit":
        return from_bitsandbytes(optim)
    return lambda groups, compiled: _make(optim, compute, groups, compiled)


def _make(optim: Optim, compute: torch.dtype, groups: list[dict[str, Any]], compiled: bool) -> torch.optim.Optimizer:
    lr = torch.tensor(optim.lr) if compiled else optim.lr
    if optim.name == "sgd":
        return SGD(groups, lr=lr, momentum=optim.momentum)
    if optim.name == "lion":
        return Lion(groups, lr=lr, betas=optim.betas)
    if optim.name == "adafactor":
        return Adafactor(groups, lr=lr)
    if optim.name == "muon":
        return Muon(groups, lr=lr, betas=optim.betas, eps=optim.eps, momentum=optim.momentum, compute=compute)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    if isinstance(lr, Tensor) or "tpu" in devices:  # torch's skips a step only where it is fused
        return AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, decoupled=optim.name == "adamw")
    torchs = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    has_fused = devices in ({"cuda"}, {"cpu"})
    # fused=None: torch's default, which refuses no device
    return torchs(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True if has_fused else None)


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

    A compiled step reads these tensors as inputs. A copy into an old tensor would be a program of its own, and a number
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


# ------------------------------------------------ optimizers of the user's own, tried on the host before they train


def from_factory(optim: Optim, name: str) -> Make:
    """`make_optimizer` for a `function(groups, lr)`; lr is a number, or in compiled steps a float32 tensor.

    Raises ConfigError for a function that can't be used. So it does for an optimizer that keeps what a checkpoint
    doesn't hold, whose state doesn't start at zero, or that ignores `lr` or `weight_decay` of its groups: trials show
    it, each of two steps on small tensors.
    """
    function = load_factory("optim.factory", name)

    def make(groups: list[dict[str, Any]], compiled: bool) -> torch.optim.Optimizer:
        lr = torch.tensor(optim.lr) if compiled else optim.lr
        optimizer: object = call_user(f"optim.factory: {name}", function, groups, lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            actual = type(optimizer).__name__
            raise ConfigError(f"optim.factory: expected a torch.optim.Optimizer from {name}, found {actual}.")
        return optimizer

    if problem := _problem(lambda **changes: _trial(make, name, **changes), decays=optim.weight_decay > 0):
        raise ConfigError(f"optim.factory: {name}: {problem}.")
    return make


class Trial(NamedTuple):
    weights: list[Tensor]
    states: list[dict[str, Any]]  # of each weight
    group: dict[str, Any]


def _problem(run: Callable[..., Trial], *, decays: bool) -> str:
    """What keeps the optimizer from training here, or nothing. Engines lay out all state as zeros before a step."""
    plain = run()
    own = {key: value for state in plain.states for key, value in state.items() if value is not None}
    if others := sorted(key for key, value in own.items() if not isinstance(value, Tensor)):
        return f"expected tensors as its state, found {others}, which a checkpoint doesn't hold. Make them tensors"
    if counted := sorted(key for key, value in run(steps=1).group.items() if value != plain.group[key]):
        return f"expected groups that a step leaves alone, found {counted} changed. Keep them in the state, as tensors"
    zeroed = run(zeros=plain.states)
    if not _equal(zeroed.weights, plain.weights):
        pairs = [(a, b) for a, b in zip(plain.states, zeroed.states, strict=True)]
        differ = sorted({key for a, b in pairs for key in a if not _equal([a[key]], [b[key]])})
        return f"expected state that starts at zero, found {differ or sorted(own)} that doesn't. Let it start at zero"
    if _equal(run(lr=1e-3).weights, plain.weights):
        return "expected a step that reads `lr` of its groups, found one that doesn't. Read it in each step"
    if decays and _equal(run(weight_decay=0.0).weights, plain.weights):
        return "`weight_decay` of its groups has no effect. Read it in each step, or set optim.weight_decay=0"
    return ""


def _trial(
    make: Make,
    name: str,
    *,
    steps: int = 2,
    lr: float = 1e-2,
    weight_decay: float = 0.25,
    zeros: list[dict[str, Any]] | None = None,
) -> Trial:
    """`zeros`: state whose shapes and dtypes that of the trial has from the start, as zeros."""
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
