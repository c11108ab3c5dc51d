"""The experts of a mixture, with static shapes and no read on the host.

transformers' own loop over experts reads on the host which tokens each of them got: a wait in every layer, and a new
program in every step on XLA. `grouped_experts` sorts the tokens by expert and multiplies each group by its expert's
weights alone. `dense_experts` runs every expert on every token, which needs no kernel, and costs num_experts / top_k
times the products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.layout import Spec, expert_spec
from portable_fsdp.runtime.errors import ConfigError

DENSE = "portable_fsdp_dense"
GROUPED = "portable_fsdp_grouped"


def grouped_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts; arguments as of `dense_experts`. Needs a kernel for grouped
    products, see `is_aligned`."""
    chosen, order = top_k_index.flatten().sort(stable=True)
    out = products_by_group(self, copies_of(hidden, top_k_index)[order], chosen)
    return weighted_sum(torch.empty_like(out).index_copy(0, order, out), top_k_weights).to(hidden.dtype)


def copies_of(hidden: Tensor, top_k_index: Tensor) -> Tensor:
    """`[tokens, hidden]` -> `[tokens * top_k, hidden]`: each token once for each of its experts."""
    return hidden[:, None].expand(-1, top_k_index.shape[1], -1).flatten(0, 1)


def weighted_sum(out: Tensor, top_k_weights: Tensor) -> Tensor:
    """`[tokens * top_k, hidden]`, `[tokens, top_k]` -> `[tokens, hidden]`."""
    return (out.unflatten(0, top_k_weights.shape) * top_k_weights[..., None]).sum(dim=1)


def products_by_group(experts: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    """Run each expert on its rows.

    `rows`: `[rows, hidden]`, sorted by `chosen`, int64 `[rows]`: the expert of each row. Rows of an expert that the
    module lacks come last; their results are arbitrary, perhaps NaN.
    """
    count = experts.down_proj.shape[0]  # not `num_experts`: a device may hold fewer
    ends = torch.searchsorted(chosen, torch.arange(count, device=rows.device), right=True, out_int32=True)
    product: Any = getattr(F, "grouped_mm", None) or cast(Any, torch)._grouped_mm  # the name until torch 2.9
    of_row = chosen.clamp(max=count - 1) if experts.has_bias else chosen

    def linear(inputs: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(experts, name)
        out = product(inputs.contiguous(), weight if experts.is_transposed else weight.transpose(1, 2), offs=ends)
        return out + getattr(experts, f"{name}_bias")[of_row] if experts.has_bias else out

    return run_expert(experts, rows, linear)


def run_expert(experts: Any, rows: Tensor, linear: Any) -> Tensor:
    """Run the layers of an expert: `linear(rows, name)` multiplies by the weight of that name."""
    if experts.has_gate:
        inner = experts._apply_gate(linear(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(rows, "up_proj"))
    out = linear(inner, "down_proj")
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def dense_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts. Takes the arguments of transformers' `ExpertsInterface`.

    Args:
        self: the experts module, with `num_experts`, and weights in the layout of `use_experts_implementation`.
        hidden: `[tokens, hidden]`.
        top_k_index: `[tokens, top_k]` int64; top_k_weights: `[tokens, top_k]`, any float dtype.

    Returns: `[tokens, hidden]`, in the dtype of `hidden`.
    """
    ids = torch.arange(self.num_experts, device=hidden.device)
    # Compare and sum instead of scatter: a partitioner can split this by rows.
    share = ((top_k_index[..., None] == ids) * top_k_weights[..., None]).sum(dim=1)  # [tokens, experts]
    out = run_expert(self, hidden, partial(_linear, self))
    return (out * share.t()[..., None]).sum(dim=0).to(hidden.dtype)


def _linear(experts: Any, hidden: Tensor, name: str) -> Tensor:
    """`[tokens, in]` or `[experts, tokens, in]` -> `[experts, tokens, out]`."""
    weight: Tensor = getattr(experts, name)
    out = hidden @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out


def choose_experts(model: Any, implementation: str, itemsize: int, *, eager: bool) -> None:
    """Set the experts implementation of `model` to `model.experts`.

    `itemsize`: bytes per value in the compute dtype. `eager`: operations run one by one; else an engine may have a
    kernel of its own instead of the dense formula. Raises ConfigError for a model without experts, and if grouped_mm
    can't run them.
    """
    experts = {name: model.get_submodule(name) for name in expert_modules(model)}
    if implementation != "auto" and not experts:
        raise ConfigError(
            f"model.experts: expected auto, found {implementation}: {type(model).__name__} has no experts whose "
            "implementation can be set in transformers.\n  Set model.experts=auto."
        )
    unaligned = _unaligned(experts, itemsize)
    if implementation == "grouped_mm" and unaligned:
        raise ConfigError(
            "model.experts=grouped_mm: expected experts whose rows are a multiple of 16 bytes, found "
            f"{unaligned} with {itemsize} bytes per value.\n  Set model.experts=auto."
        )
    if implementation == "auto":
        implementation = "grouped_mm" if eager and not unaligned else "dense"
    names = {"dense": DENSE, "grouped_mm": GROUPED}
    try:
        model.set_experts_implementation(names.get(implementation, implementation))
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.experts={implementation}: transformers refuses it for {type(model).__name__}: {error}\n"
            "  Set model.experts=auto."
        ) from error


def register_experts() -> None:
    """Register both implementations in transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(DENSE, dense_experts)
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, grouped_experts)


def _unaligned(experts: dict[str, nn.Module], itemsize: int) -> str:
    """Return a weight whose rows aren't multiples of 16 bytes, which torch's grouped product requires; else empty."""
    for name, module in experts.items():
        for leaf, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and any(size * itemsize % 16 for size in weight.shape[1:]):
                return f"{name}.{leaf} {list(weight.shape)}"
    return ""


def expert_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the FQNs of the modules of experts whose implementation can be set."""
    return tuple(name for name, module in model.named_modules() if takes_implementation(module))


def expert_layouts(model: nn.Module, experts: Sequence[str], devices: int, itemsize: int) -> dict[str, Spec]:
    """Return FQN -> layout of the weights of experts over an axis of `devices`. Raises ConfigError for a model without
    experts, and if the devices don't divide their number, or grouped products can't run them."""
    if unaligned := _unaligned({name: model.get_submodule(name) for name in experts}, itemsize):
        raise ConfigError(
            f"sharding.expert: expected experts whose rows are a multiple of 16 bytes, found {unaligned} with "
            f"{itemsize} bytes per value.\n  Set sharding.expert=1."
        )
    if not experts:
        raise ConfigError(
            f"sharding.expert: {type(model).__name__} has no experts whose implementation can be set in transformers.\n"
            "  Set sharding.expert=1."
        )
    weights = {f"{name}.{leaf}": w for name in experts for leaf, w in model.get_submodule(name).named_parameters()}
    for fqn, weight in weights.items():
        if weight.dim() < 2 or len(weight) % devices:
            count = len(weight) if weight.dim() else 1
            fitting = " or ".join(str(size) for size in range(1, count + 1) if count % size == 0)
            raise ConfigError(
                f"sharding.expert: {devices} devices can't divide the experts of {fqn} {list(weight.shape)}.\n"
                f"  Set sharding.expert={fitting if weight.dim() > 1 else 1}."
            )
    return {fqn: expert_spec(weight.dim()) for fqn, weight in weights.items()}


def takes_implementation(module: nn.Module) -> bool:
    """Whether the module's class has transformers' decorator `use_experts_implementation`."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
