"""What the routers of a mixture of experts choose: the load of each expert, and two ways to balance it.

Forwards leave their counts in tensors of their modules, in place: a recomputation writes the same values again. A step
sums them over the global batch.

transformers' auxiliary loss is E * sum over experts of (mean count of choices) * (mean probability), over all layers
and tokens. Its gradient needs the counts of the whole global batch. They are known before the backward, which adds the
gradient at the routers' logits, as Megatron-LM's MoEAuxLossAutoScaler does: no logits leave a recomputed layer.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from portable_fsdp.attach import load_of, set_load
from portable_fsdp.layout import LOSS_AXES
from portable_fsdp.models.experts import choice_counts, expert_modules
from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:  # a run without sharding.tensor doesn't load it
    from portable_fsdp.tensor_plan import TensorPlan

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the buffers that transformers adds to an expert's score for the choice alone."""

SumOver = Callable[[Tensor, Sequence[str]], Tensor]
"""`Backend.sum`."""


class Routers:
    """The routers and experts of a model. Counts include padding, as transformers' do without an attention mask.

    If one module of experts runs several times in a forward, its last run counts.
    """

    def __init__(self, model: Any, plan: "TensorPlan | None", bias_rate: float, *, has_loss: bool, drops: bool) -> None:
        """Add what forwards run. `drops`: exchanges of experts may drop rows. Raises ConfigError, see
        `balanced_routers` and `_biases`."""
        names = expert_modules(model)
        self._experts: list[Any] = [model.get_submodule(name) for name in names]
        self._axes = _axes(plan, names)
        self._sizes = [module.num_experts + 1 for module in self._experts]
        self._biases = _biases(model, names) if bias_rate else []
        self._rate, self._drops = bias_rate, drops
        self._share: Tensor | None = None
        self._balanced: list[Any] = []
        self._balances: dict[nn.Module, Tensor] = {}  # of the running forward
        self.has_loss = has_loss
        if has_loss:
            routers = balanced_routers(model)
            self._scale, self._experts_of_loss = float(model.router_aux_loss_coef), int(model.num_experts)
            self._top_k, self._axes_of_loss = int(model.num_experts_per_tok), _axes(plan, [*routers])
            for module, index in routers.values():
                module.register_forward_hook(partial(self._count, index))
                self._balanced.append(module)

    def zeros(self) -> dict[str, Tensor]:
        """Return the sums before the first forward of a step, on the host."""
        sums = {"loads": torch.zeros(sum(self._sizes))} if self._experts else {}
        return sums | ({"balance": torch.zeros(2, self._experts_of_loss)} if self.has_loss else {})

    def open(self, device: torch.device) -> None:
        """Make the tensors that the next forward counts into."""
        for module, size in zip(self._experts, self._sizes, strict=True):
            set_load(module, torch.zeros(size, device=device))
        self._balances = {module: torch.zeros(2, self._experts_of_loss, device=device) for module in self._balanced}

    def take(self, sum_over: SumOver, *, balance: Tensor | None = None) -> dict[str, Tensor]:
        """Return what the forward since `open` chose.

        `loads` `[n]`, of this device: for each module of experts the rows of each expert, and the rows dropped. With a
        router loss `balance` `[2, experts]`, of all devices: choices, and summed probabilities, of all layers; or the
        argument, if it is known. *collective*
        """
        loads = [load for module in self._experts if (load := load_of(module)) is not None]
        taken = {"loads": torch.cat(loads)} if loads else {}
        if self.has_loss:
            own = torch.stack([*self._balances.values()]).sum(dim=0)
            taken["balance"] = sum_over(own, self._axes_of_loss) if balance is None else balance
        for module in self._experts:  # on XLA tensors that live on are results of each program
            set_load(module, None)
        self._balances = {}
        return taken

    def prepare_backward(self, balance: Tensor, scale: Tensor | float) -> None:
        """Set the factors of backward's gradients from the `balance` of the global batch. `scale`: of the loss."""
        counts, rows = balance[0], balance[0].sum() / self._top_k
        self._share = counts * (self._scale * self._experts_of_loss * scale / rows.square())

    def loss(self, balance: Tensor) -> Tensor:
        """Return transformers' auxiliary loss times its coefficient, from the `balance` of the global batch."""
        rows = balance[0].sum() / self._top_k
        return self._scale * self._experts_of_loss * (balance[0] / rows * (balance[1] / rows)).sum()

    def finish_step(self, sums: Mapping[str, Tensor], is_skipped: Tensor, sum_over: SumOver) -> dict[str, Tensor]:
        """Update the biases from the step's `loads`, unless `is_skipped` (0-dim, bool); return metrics. *collective*"""
        metrics = {"router_loss": self.loss(sums["balance"])} if self.has_loss else {}
        if not self._experts:
            return metrics
        loads = sum_over(sums["loads"], self._axes).split(self._sizes)
        with torch.no_grad():
            for owner, leaf, at in self._biases:
                load = loads[at][:-1]
                step = torch.sign(load.sum() - load * len(load)) * self._rate  # no mean, which would round
                getattr(owner, leaf).add_(torch.where(is_skipped, 0.0, step))
        by_layer, tiny = [load[:-1] for load in loads], torch.finfo(torch.float32).tiny
        total = torch.cat(by_layer).sum().clamp(min=1)
        metrics["expert_load_max"] = torch.stack([load.max() / load.mean().clamp(min=tiny) for load in by_layer]).max()
        if len({*self._sizes}) == 1:
            metrics["expert_load"] = torch.stack(by_layer).sum(dim=0) / total
        if self._drops:
            metrics["experts_dropped"] = torch.stack([load[-1] for load in loads]).sum() / total
        return metrics

    def _count(self, index: int, module: Any, _: Any, output: Any) -> Any:
        """Count a router's output, and add the gradient of the loss to its logits: output `index`, or the only one."""
        values: list[Any] = [*output] if isinstance(output, tuple) else [output]
        logits: Tensor = values[index if len(values) > 1 else 0]
        flat = logits.detach().float().flatten(0, -2)
        if (balance := self._balances.get(module)) is not None:
            counts = choice_counts(flat.topk(self._top_k, dim=-1).indices, flat.shape[-1])
            balance.copy_(torch.stack([counts, flat.softmax(dim=-1).sum(dim=0)]))
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return None
        # The model may drop the logits: the gradient enters through another output, whose backward runs.
        used = [at for at, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
        at = next((at for at in used if values[at] is not logits), used[0])
        values[at] = _Balanced.apply(values[at], logits, self)
        return type(output)(values) if isinstance(output, tuple) else values[0]

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the gradient of the loss for a router's logits."""
        if self._share is None:
            raise RuntimeError("output_router_logits: backward needs the counts of the global batch; use train_step")
        probabilities = logits.float().softmax(dim=-1)
        of_probabilities = probabilities * self._share
        return (of_probabilities - probabilities * of_probabilities.sum(dim=-1, keepdim=True)).to(logits.dtype)


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, logits: Tensor, routers: Routers) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.routers = routers
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.routers.gradient(ctx.saved_tensors[0]), None


def _axes(plan: "TensorPlan | None", names: Sequence[str]) -> tuple[str, ...]:
    """The axes whose devices see different tokens in the modules `names`: with sequence parallelism also `tensor`,
    except in blocks, which gather them."""
    whole = () if plan is None else tuple(f"{block}." for block in (*plan.blocks, *plan.whole_blocks))
    splits = plan is not None and plan.splits_rows and not any(f"{name}.".startswith(whole) for name in names)
    return (*LOSS_AXES, "tensor") if splits else LOSS_AXES


def balanced_routers(model: Any) -> dict[str, tuple[nn.Module, int]]:
    """Return FQN -> module whose output has router logits, and their index in it, as transformers records them.

    Raises ConfigError unless the model's class computes transformers' common `load_balancing_loss_func` of them.
    """
    kind = type(model)
    formula = getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)
    arguments = () if formula is None else tuple(signature(formula).parameters)
    routers = dict(_recorded(model))
    coefficient = getattr(model, "router_aux_loss_coef", None)
    if coefficient is None or arguments != ("gate_logits", "num_experts", "top_k", "attention_mask") or not routers:
        raise ConfigError(
            f"model: output_router_logits=true: {kind.__name__} computes no router loss, or another one than "
            "transformers' common load_balancing_loss_func.\n"
            "  Set output_router_logits=false in model.architecture (in a folder: in its config.json)."
        )
    return routers


def _recorded(model: Any) -> Iterator[tuple[str, tuple[nn.Module, int]]]:
    recorders = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        kind, part = getattr(recorder, "target_class", recorder), getattr(recorder, "layer_name", None)
        for name, module in model.named_modules():
            if isinstance(module, kind) and (part is None or f".{part}." in f".{name}."):
                yield name, (module, getattr(recorder, "index", 1))


def _biases(model: Any, experts: Sequence[str]) -> list[tuple[nn.Module, str, int]]:
    """Return the module, the name and the place in `experts` of each bias of choices. Raises ConfigError for a model
    without such buffers, and for one that isn't of the experts beside it."""
    blocks = {name.rpartition(".")[0]: at for at, name in enumerate(experts)}
    found: list[tuple[nn.Module, str, int]] = []
    for fqn, buffer in model.named_buffers():
        owner, _, leaf = fqn.rpartition(".")
        if leaf in _BIASES:
            at = next((at for block, at in blocks.items() if f"{owner}.".startswith(f"{block}.")), None)
            size = None if at is None else model.get_submodule(experts[at]).num_experts
            if at is None or buffer.shape != (size,):
                raise ConfigError(
                    f"model.router_bias_rate: {fqn} {[*buffer.shape]} needs one value for each of the experts beside "
                    f"it, found {'no experts' if size is None else size}.\n  Set model.router_bias_rate=0."
                )
            found.append((model.get_submodule(owner), leaf, at))
    if not found:
        raise ConfigError(
            f"model.router_bias_rate: {type(model).__name__} has no buffer {' or '.join(_BIASES)} in its routers.\n"
            "  Set model.router_bias_rate=0; output_router_logits=true in model.architecture balances by a loss."
        )
    return found
