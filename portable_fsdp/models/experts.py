"""The experts of a mixture, with static shapes and no read on the host.

transformers' own loop over experts reads on the host which tokens each of them got: a wait in every layer, and a new
program in every step on XLA. `experts_on_devices` sorts the tokens by expert and multiplies each group by its expert's
weights alone. `dense_experts` runs every expert on every token, which needs no kernel, and costs num_experts / top_k
times the products. An engine that has its own products, or the mesh axis `expert`, sets `Groups` on the modules of
experts.

Rows are moved by gathers alone, backward too: each gather comes with its inverse. A scatter is slow on TPUs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from portable_fsdp.attach import expert_groups_of, load_of
from portable_fsdp.layout import Spec, expert_spec
from portable_fsdp.runtime.errors import ConfigError

DENSE = "portable_fsdp_dense"
_NO_EXPERTS = "has no experts whose implementation can be set in transformers"


def choice_counts(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each of `experts` is in an int64 tensor: float32 `[experts]`; other numbers don't count."""
    if chosen.device.type == "xla":  # a partitioner can split this by rows
        ids = torch.arange(experts, device=chosen.device)
        return (chosen.flatten()[:, None] == ids).sum(dim=0, dtype=torch.float32)
    counts = torch.zeros(experts + 1, device=chosen.device)
    return counts.index_add(
        0, chosen.flatten().clamp(max=experts), torch.ones_like(chosen.flatten(), dtype=counts.dtype)
    )[:-1]


def weight_of(experts: Any, name: str) -> Tensor:
    """Return a weight of a module of experts, plus its adapter's product if it has one (`expert_adapters.py`)."""
    adapter = getattr(getattr(experts, "lora_of", None), name, None)
    return getattr(experts, name) if adapter is None else adapter(getattr(experts, name))


def grouped_linear(experts: Any, ends: Tensor, rows: Tensor, name: str) -> Tensor:
    """Multiply each group of `rows` `[rows, inputs]` by its expert's weight `name`.

    `ends`: int32 `[experts]`, the end of each group. What follows the last one is arbitrary in the result, perhaps NaN.
    """
    weight = weight_of(experts, name)
    weight = weight if experts.is_transposed else weight.transpose(1, 2)
    out = None
    if _has_kernel(rows, weight):
        product: Any = getattr(F, "grouped_mm", None) or cast(Any, torch)._grouped_mm
        out = cast(Tensor, product(rows.contiguous(), weight, offs=ends))
        if not experts.has_bias:
            return out
    expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)  # of each row
    if out is None:  # every row by every expert
        is_own = expert == torch.arange(len(ends), device=rows.device)[:, None]
        out = ((rows @ weight) * is_own[..., None]).sum(dim=0)
    if not experts.has_bias:
        return out
    out = out + getattr(experts, f"{name}_bias")[expert.clamp(max=len(ends) - 1)]
    return torch.where((expert < len(ends))[:, None], out, 0.0)  # the bias gets no gradient of what is arbitrary


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """torch's products need rows of a multiple of 16 bytes. torch 2.9 has a private function, which takes other dtypes
    than bfloat16 on CPUs alone, and never on tensors without values: in plans, and while torch.compile traces."""
    if any(size * weight.itemsize % 16 for size in weight.shape[1:]):
        return False
    if rows.dtype == torch.bfloat16 or hasattr(F, "grouped_mm"):
        return True
    return rows.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(rows, FakeTensor)


def run_expert(experts: Any, rows: Tensor, linear: Callable[[Tensor, str], Tensor]) -> Tensor:
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
    weight = weight_of(experts, name)
    out = hidden @ (weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out


# ---------------------------------------------------------------------------------------------------------- by groups


class Groups(Protocol):
    """What an engine does for the experts of its devices, which hold different tokens. Tensors are `[devices, ...]`."""

    devices: int
    divisions: int
    """Devices along the axis `expert`; each holds this part of the experts."""
    capacity: float | None
    """Rows that a device takes, in multiples of an even load: rows beyond it give 0. None: room for all."""
    multiple: int
    """Numbers of rows in products are multiples of this."""

    def on_each(self, function: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
        """Run a function of each device's part, without gradients."""
        ...

    def exchange(self, buffer: Tensor) -> Tensor:
        """`[devices, to, ...]` -> `[devices, from, ...]`: an all-to-all over the axis `expert`."""
        ...

    def linear(self, experts: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        """Do what `grouped_linear` does; `sizes`: int32 `[devices, experts of a device]`, the rows of each group.

        `active`: the sum of the sizes, in the mean over devices.
        """
        ...


class OneDevice:
    """The `Groups` of a process that runs for its one device."""

    devices, multiple = 1, 1

    def __init__(
        self, divisions: int = 1, capacity: float | None = None, exchange: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        """`exchange`: an all-to-all of dimension 0, `[divisions, ...]`, between processes along the axis `expert`."""
        self.divisions, self.capacity, self._exchange = divisions, capacity, exchange

    def on_each(self, function: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [out[None] for out in function(*(tensor[0] for tensor in tensors))]

    def exchange(self, buffer: Tensor) -> Tensor:
        return self._exchange(buffer[0])[None]

    def linear(self, experts: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        return grouped_linear(experts, sizes[0].cumsum(dim=0, dtype=torch.int32), rows[0], name)[None]


def experts_on_devices(
    groups: Groups, experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the chosen experts; arguments as of `dense_experts`.

    Under the axis `expert` each device writes the rows of its tokens into a buffer with a part for each device of the
    axis, sorted by expert. A part has room for the worst case, or for `capacity`. Products compute the rows that
    arrive, and no padding. *collective*
    """
    top_k = top_k_index.shape[1]
    own = hidden.reshape(groups.devices, -1, hidden.shape[1])
    chosen = top_k_index.reshape(groups.devices, -1).int()
    tokens, choices = own.shape[1], chosen.shape[1]
    held = experts.num_experts // groups.divisions

    def run(rows: Tensor, uses: int, sort: Callable[..., list[Tensor]], ids: Tensor) -> Tensor:
        """Return the outputs of the experts in `ids`: `uses` of them for each row."""
        sizes, order, rank = groups.on_each(sort, ids)
        by_expert = _take(groups, rows, order // uses, rank.unflatten(1, (-1, uses)))
        out = run_expert(experts, by_expert, partial(groups.linear, experts, sizes, choices))
        return _take(groups, out, rank, order[..., None])

    if groups.divisions == 1:
        out = run(own, top_k, partial(_sorted, held), chosen)
    else:
        drops, room = groups.capacity is not None, tokens * min(top_k, held)  # a token has different experts
        if groups.capacity is not None:
            room = min(room, math.ceil(choices / groups.divisions * groups.capacity))
        room = -(-room // groups.multiple) * groups.multiple
        buffer = (groups.divisions, room)
        place = partial(_places, groups.divisions, held, room, drops)
        slot, choice, ends, dropped = groups.on_each(place, chosen)
        if drops and (load := load_of(experts)) is not None:
            load[-1:].copy_(dropped.sum(dim=0))
        sent = _take(groups, own, choice // top_k, slot.unflatten(1, (-1, top_k)), drops=drops)
        received = groups.exchange(sent.unflatten(1, buffer)).flatten(1, 2)
        out = run(received, 1, partial(_sorted_places, room), groups.exchange(ends))
        out = groups.exchange(out.unflatten(1, buffer)).flatten(1, 2)
        out = _take(groups, out, slot, choice[..., None], drops=drops)
    weighted = out.unflatten(1, (-1, top_k)) * top_k_weights.reshape(groups.devices, -1, top_k)[..., None]
    return weighted.sum(dim=2).view_as(hidden).to(hidden.dtype)


def _sorted(groups: int, chosen: Tensor) -> list[Tensor]:
    """`[n]` -> int32: the size of each group, the order that sorts, and each one's rank in it. Ids from `groups` on
    sort to the end."""
    ids, order = chosen.sort(stable=True)
    experts = torch.arange(groups, device=chosen.device)
    if chosen.device.type == "xla":  # scatters are slow
        sizes, rank = (chosen[:, None] == experts).sum(dim=0), order.argsort()
    else:
        sizes = torch.searchsorted(ids, experts, right=True).diff(prepend=experts.new_zeros(1))
        rank = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
    return [sizes.int(), order.int(), rank.int()]


def _places(divisions: int, held: int, room: int, drops: bool, chosen: Tensor) -> list[Tensor]:
    """Place the choices `[n]` in a buffer `[divisions, room]`, by the device of their expert and sorted by it.

    Returns int32 the place of each choice, or divisions * room: dropped; the choice at each place, or n: none; the end
    of each expert's rows in its device's part, `[divisions, held]`; and float32 `[1]`, how many choices it drops.
    """
    count = divisions * held
    n_held, n_room, n = (_number(value, chosen) for value in (held, room, len(chosen)))
    to, is_lost = chosen.long() // n_held, torch.zeros_like(chosen, dtype=torch.bool)  # `to`: the device
    if drops:  # experts take turns, so that the largest lose first
        sizes, _, rank = (result.long() for result in _sorted(count, chosen))
        firsts = sizes.cumsum(dim=0) - sizes
        nth = rank - firsts.index_select(0, chosen)  # among the rows of its expert
        turns = ((to * n + nth) * n_held + chosen % n_held).argsort().argsort()
        is_lost = turns - firsts[::held].index_select(0, to) >= n_room
        chosen = torch.where(is_lost, _number(count, chosen), chosen.long()).int()
    sizes, order, rank = (result.long() for result in _sorted(count, chosen))  # torch_xla doesn't promote in `where`
    ends = sizes.view(divisions, held).cumsum(dim=1)
    rows = sizes.view(divisions, held).sum(dim=1)
    first = rows.cumsum(dim=0) - rows  # of each device, in the order
    slot = torch.where(is_lost, _number(divisions * room, chosen), to * n_room + rank - first.index_select(0, to))
    places = torch.arange(room, device=chosen.device)
    at = torch.minimum(first[:, None] + places, n - 1)
    choice = torch.where(places < rows[:, None], order.index_select(0, at.flatten()).view(at.shape), n)
    return [slot.int(), choice.flatten().int(), ends.int(), is_lost.sum(dim=0, keepdim=True).float()]


def _number(value: int, like: Tensor) -> Tensor:
    """Return int64 `[1]`, which is a constant on XLA.

    torch_xla 2.9 makes an input of a Python number other than 0 and 1, and of the length in `x[index]`. `scan` carries
    inputs through its loop, and libtpu 0.0.21 aborts where each device runs by itself. Until it takes them.
    """
    return torch.arange(value, value + 1, device=like.device)


def _sorted_places(room: int, ends: Tensor) -> list[Tensor]:
    """Sort the rows of a received buffer `[from, room]` by expert, see `_sorted`; `ends`: `[from, held]`."""
    places = torch.arange(room, device=ends.device)
    expert = (places[:, None] >= ends[:, None]).sum(dim=-1).flatten()
    return _sorted(ends.shape[1], expert)


def _take(groups: Groups, rows: Tensor, index: Tensor, back: Tensor, *, drops: bool = False) -> Tensor:
    """Return `rows[index]` of each device. An index equal to the number of rows gives any row, or 0 with `drops`.

    `rows`: `[devices, rows, hidden]`; `index`: `[devices, n]`; `back` `[devices, rows, uses]`: the places of each row
    in the result, or n.
    """
    return cast(Tensor, _Take.apply(rows, index, back, groups, drops))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor, groups: Groups, drops: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.groups, ctx.drops = groups, drops
        return groups.on_each(partial(_taken, drops), rows, index)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_rows = ctx.groups.on_each(partial(_summed, ctx.drops), gradients[0], *ctx.saved_tensors)
        return *of_rows, None, None, None, None


def _taken(drops: bool, rows: Tensor, index: Tensor) -> list[Tensor]:
    last = _number(len(rows) - 1, index)
    taken = rows.index_select(0, torch.minimum(index, last))
    return [torch.where((index <= last)[:, None], taken, torch.zeros_like(taken)) if drops else taken]


def _summed(drops: bool, gradient: Tensor, back: Tensor) -> list[Tensor]:
    (taken,) = _taken(drops, gradient, back.flatten())
    return [taken.unflatten(0, back.shape).sum(dim=1)]


# ----------------------------------------------------------------------------------------------------------- choices


def choose_experts(model: Any, implementation: str, itemsize: int, *, eager: bool) -> None:
    """Set the experts implementation of `model` to `model.experts`.

    `itemsize`: bytes per value in the compute dtype. `eager`: operations run one by one; else an engine may
    replace the dense formula by its own kernel. Raises ConfigError for a model without experts, and if grouped_mm
    can't run them.
    """
    problem = _problem(model, itemsize)
    if problem and (implementation == "grouped_mm" or (implementation != "auto" and not expert_modules(model))):
        raise ConfigError(f"model.experts={implementation}: {problem}.\n  Set model.experts=auto.")
    if implementation == "auto":
        implementation = "grouped_mm" if eager and not problem else "dense"
    try:
        model.set_experts_implementation(f"portable_fsdp_{implementation}")
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"model.experts={implementation}: transformers refuses it for {type(model).__name__}: {error}\n"
            "  Set model.experts=auto."
        ) from error


def register_experts() -> None:
    """Register the implementations in transformers. They write the rows of each expert, and at the end the number of
    dropped rows, into the tensor of `attach.set_load`, if there is one."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def counted(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(self: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if (load := load_of(self)) is not None:
                # In place: torch.compile refuses an attribute that changes in a recomputed layer.
                load[:-1].copy_(choice_counts(top_k_index, self.num_experts))
            groups = expert_groups_of(self)
            function = run if groups is None else partial(experts_on_devices, groups)
            return function(self, hidden, top_k_index, top_k_weights)

        return forward

    grouped = partial(experts_on_devices, OneDevice())
    ours = {"dense": dense_experts, "grouped_mm": grouped, "batched_mm": ALL_EXPERTS_FUNCTIONS["batched_mm"]}
    for name, run in ours.items():
        ALL_EXPERTS_FUNCTIONS.register(f"portable_fsdp_{name}", counted(run))


def _problem(model: nn.Module, itemsize: int) -> str:
    """Return why torch's grouped products can't run the experts of a model; empty: they can."""
    weights = _weights(model)
    if not weights:
        return f"{type(model).__name__} {_NO_EXPERTS}"
    for fqn, weight in weights.items():
        if weight.dim() == 3 and any(size * itemsize % 16 for size in weight.shape[1:]):
            return (
                f"expected experts whose rows are a multiple of 16 bytes, found {fqn} {list(weight.shape)} with "
                f"{itemsize} bytes per value"
            )
    return ""


def expert_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the FQNs of the modules of experts whose implementation can be set."""
    return tuple(name for name, module in model.named_modules() if takes_implementation(module))


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    names = expert_modules(model)
    return {f"{name}.{leaf}": w for name in names for leaf, w in model.get_submodule(name).named_parameters()}


def expert_layouts(model: nn.Module, devices: int) -> dict[str, Spec]:
    """Return FQN -> layout of the weights of experts over an axis of `devices`. Raises ConfigError for a model without
    experts, and if the devices don't divide their number."""
    weights = _weights(model)
    if not weights:
        raise ConfigError(f"sharding.expert: {type(model).__name__} {_NO_EXPERTS}.\n  Set sharding.expert=1.")
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
