"""Experts in static shapes: every expert on every token, weighted.

transformers' own loop over experts asks the host which tokens each of them got: a wait in every layer, and a new
program in every step on XLA. Here only the weights of a sum depend on the routing. This costs num_experts / top_k times
the FLOPs of the experts; `batched_mm` costs memory instead (a copy of the chosen weights per token), and `grouped_mm`
sorts tokens by expert, which needs kernels that not every engine has.
"""

from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.runtime.errors import ConfigError

DENSE = "portable_fsdp_dense"


def dense_experts(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the chosen experts. Takes what transformers' `ExpertsInterface` passes.

    Args:
        self: the experts module, with `num_experts` and the layout of its weights as `use_experts_implementation` says.
        hidden: `[tokens, hidden]`.
        top_k_index: `[tokens, top_k]` int64; top_k_weights: `[tokens, top_k]`, any float dtype.

    Returns: `[tokens, hidden]`, in the dtype of `hidden`.
    """
    ids = torch.arange(self.num_experts, device=hidden.device)
    # Compared and summed, not scattered: a partitioner splits this by rows like anything else.
    share = ((top_k_index[..., None] == ids) * top_k_weights[..., None]).sum(dim=1)  # [tokens, experts]
    if self.has_gate:
        out = self._apply_gate(_linear(self, hidden, "gate_up_proj"))
    else:
        out = self.act_fn(_linear(self, hidden, "up_proj"))
    out = _linear(self, out, "down_proj")
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    return (out * share.t()[..., None]).sum(dim=0).to(hidden.dtype)


def _linear(experts: Any, hidden: Tensor, name: str) -> Tensor:
    """`[tokens, in]` or `[experts, tokens, in]` -> `[experts, tokens, out]`."""
    weight: Tensor = getattr(experts, name)
    out = hidden @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out


def choose(model: Any, implementation: str, itemsize: int) -> None:
    """Make `model` run its experts as `model.experts` says; `itemsize`: bytes of a number in the compute dtype.

    Raises ConfigError for a model without experts, and where grouped_mm can't run these.
    """
    experts = {name: module for name, module in model.named_modules() if takes_implementation(module)}
    if implementation != "auto" and not experts:
        raise ConfigError(
            f"model.experts: expected auto, found {implementation}: {type(model).__name__} has no experts whose "
            "implementation transformers lets us choose.\n  Set model.experts=auto."
        )
    if implementation == "grouped_mm":
        _check_alignment(experts, itemsize)
    try:
        model.set_experts_implementation(DENSE if implementation in ("auto", "dense") else implementation)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.experts={implementation}: transformers refuses it for {type(model).__name__}: {error}\n"
            "  Set model.experts=auto."
        ) from error


def _check_alignment(experts: dict[str, nn.Module], itemsize: int) -> None:
    """torch's grouped product takes rows of whole 16 bytes: of weights, inputs and outputs."""
    for name, module in experts.items():
        for leaf, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and any(size * itemsize % 16 for size in weight.shape[1:]):
                raise ConfigError(
                    "model.experts=grouped_mm: expected experts whose rows are a multiple of 16 bytes, found "
                    f"{name}.{leaf} {list(weight.shape)} in numbers of {itemsize} bytes.\n"
                    "  Set model.experts=auto."
                )


def takes_implementation(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` decorates the module's class."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
