"""How a model becomes FSDP2 units: what is gathered together and in which dtype, recomputed and compiled within.

`shard_units` reads top to bottom in the order in which the techniques apply: casts around modules of another dtype,
gradient checkpointing, compilation of what that left, then the units, inner ones first, and the root around them.
Forwards of instances are replaced and hooks are added; no wrapper changes a name.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from portable_fsdp.backends.contract import ShardPolicy, dropouts, output_head, parameter_slots
from portable_fsdp.backends.native.boundary import Boundary
from portable_fsdp.backends.nested import Replacement, flatten, floats_in
from portable_fsdp.backends.weight_uses import dtype_of, in_own_dtype
from portable_fsdp.runtime.errors import BackendError

ROOT = ""

# Where SDPA has no kernel for its arguments (grouped heads on CPU), it runs as batched products and a softmax. These
# are no "attention", or the experts' products would be kept with it.
_OPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}


class UnitGroup(NamedTuple):
    """A unit, and the groups inside it that are gathered along with it: the steps that prefetching counts in."""

    unit: FSDPModule
    inside: tuple[FSDPModule, ...]


def shard_units(model: nn.Module, policy: ShardPolicy, mesh: DeviceMesh, device: torch.device) -> list[UnitGroup]:
    """Make `model` (parameters on meta) and its units FSDP2 modules over `mesh`, 1-D ("shard") or 2-D ("replicate",
    "shard"), to compute on `device`; returns the root and the units in the order of definition.

    A unit's parameters are gathered in one dtype, so modules inside it that compute in another one form a group of
    their own. A weight that several modules share belongs to the unit that holds them all; BackendError without one.
    Weights without a dimension belong to none.
    """
    shared = _shared_weights(model)
    units = [name for name in policy.units if _has_weights(model, name, shared)]
    groups = _groups(policy, units)
    cast_modules(model, policy)
    cast_scalars(model, policy, device)
    for name in dict.fromkeys((*policy.recompute, *policy.layers)):
        layer = model.get_submodule(name)
        holds_units = any(_is_in(inner, name) for inner in (*units, *policy.modules))
        if name in policy.recompute:
            recompute(layer, policy, whole=holds_units)
        if name in policy.layers and policy.compile_backend is not None:
            compile_layer(layer, policy.compile_backend, breaks=holds_units)
    for name in (*reversed(units), ROOT):
        for dtype, names in (*groups[name].items(), (dtype_of(name, policy), [name])):
            _fully_shard(model, names, shared, policy, mesh, dtype, is_root=name == ROOT)
        if policy.cast_inputs:
            cast_inputs(model.get_submodule(name), dtype_of(name, policy))
    _require_sharded(model, shared)
    for name in units:
        _gather_once(model.get_submodule(name), output_head(model))
    return _gather_order(model, policy, units, groups)


def _is_in(name: str, outer: str) -> bool:
    return outer == ROOT != name or name.startswith(f"{outer}.")


# ------------------------------------------------------------------------------------------------------- the dtypes


def _groups(policy: ShardPolicy, units: list[str]) -> dict[str, dict[torch.dtype, list[str]]]:
    """Unit -> dtype -> the modules inside it that compute in that dtype, where it isn't the unit's."""
    groups: dict[str, dict[torch.dtype, list[str]]] = {name: {} for name in (*units, ROOT)}
    for name, dtype in policy.modules.items():
        # The innermost unit that the module lies in and is not; the root holds all.
        unit = max((unit for unit in units if _is_in(name, unit)), key=len, default=ROOT)
        if name not in units and dtype != dtype_of(unit, policy):
            groups[unit].setdefault(dtype, []).append(name)
    return groups


def cast_modules(model: nn.Module, policy: ShardPolicy) -> None:
    """Modules of another dtype take that, and give the model's; the head gives its own. FSDP2 wouldn't: of a list of
    modules, it casts for the first only."""
    head = output_head(model)
    for name, dtype in policy.modules.items():
        module = model.get_submodule(name)
        if module is head:
            cast_inputs(module, dtype)
        else:  # no hooks: they have numbers, for which torch.compile would make each layer a program
            module.forward = MethodType(_in_own_dtype(forward_of(module), dtype, policy.compute), module)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast by hooks, so that a list or an object that the module changes is changed for its caller too."""
    running: list[Replacement] = []

    def cast_all(_: nn.Module, args: Any, kwargs: Any) -> Any:
        running.append(floats_in(dtype))
        return running[-1]((args, kwargs))

    module.register_forward_pre_hook(cast_all, with_kwargs=True)
    # Before FSDP2's hook, at which Boundary writes back too.
    module.register_forward_hook(
        lambda *_: running.pop().write_back() if running else None, prepend=True, always_call=True
    )


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward of its class, or its replacement, with the module as first argument: equal for equal layers."""
    forward = module.forward
    return forward.__func__ if isinstance(forward, MethodType) else lambda _, *args, **named: forward(*args, **named)


@cache
def _in_own_dtype(forward: Callable[..., Any], dtype: torch.dtype, back: torch.dtype | None) -> Callable[..., Any]:
    return in_own_dtype(forward, dtype, back)


# -------------------------------------------------------------------------------------- recomputation, compilation


def recompute(layer: nn.Module, policy: ShardPolicy, *, whole: bool, forward: Callable[..., Any] | None = None) -> None:
    """Put a layer under gradient checkpointing. `forward(layer, ...)`: what runs in place of its forward."""
    draws = bool(dropouts(layer))
    make = _recomputed.__wrapped__ if forward else _recomputed  # it would keep the layer alive
    layer.forward = MethodType(make(forward or forward_of(layer), policy.save_ops, whole, draws), layer)


def compile_layer(layer: nn.Module, backend: str, *, breaks: bool) -> None:
    """Shapes are static, hooks stay outside. Those of a unit inside break the graph (`breaks`); else it is one."""
    # torch's default is inductor; torch_tpu makes its own compiler the default.
    options: dict[str, Any] = {} if backend == "auto" else {"backend": backend}
    layer.forward = torch.compile(layer.forward, **options, fullgraph=not breaks, dynamic=False)


@cache  # equal layers get the same function, so that torch.compile makes one program for all of them
def _recomputed(
    forward: Callable[..., Any], save_ops: tuple[str, ...], whole: bool, draws: bool = False
) -> Callable[..., Any]:
    """A layer's `forward` under gradient checkpointing; it keeps the outputs of `save_ops`.

    `draws`: it has dropout, and draws the same numbers again.
    `whole`: run all of it again. By default torch stops the second run at the last tensor that backward needs, by an
    exception, which would leave a unit inside the layer in the middle of its forward.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws, "early_stop": not whole}
    if save_ops:
        kept = [getattr(torch.ops.aten, name).default for kind in save_ops for name in _OPS[kind]]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(forward, self, *args, **options, **kwargs)
        first = [(args, kwargs)]  # what the layer changes in them is changed for its caller
        tensors, unflatten = flatten((args, kwargs))
        del args, kwargs  # autograd's hooks decide where the second run's inputs are

        def forward_of_tensors(*tensors: Tensor) -> Any:
            args, kwargs = first.pop() if first else unflatten(tensors)
            return forward(self, *args, **kwargs)

        return checkpoint(forward_of_tensors, *tensors, **options)

    return run


# -------------------------------------------------------------------------------------------------------- the units


def _shared_weights(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each tied weight and each scalar -> FQNs of the modules that hold it."""
    names = {module: name for name, module in model.named_modules()}
    return {
        model.get_parameter(fqn): [names[place.module] for place in places]
        for fqn, places in parameter_slots(model).items()
        if len(places) > 1 or model.get_parameter(fqn).dim() == 0
    }


def _owned_further_out(shared: Mapping[nn.Parameter, list[str]], names: list[str]) -> set[nn.Parameter]:
    """The tied weights that modules other than `names` hold too: they belong to a unit further out, scalars to none."""
    return {
        weight
        for weight, owners in shared.items()
        if weight.dim() == 0 or not all(any(owner == name or _is_in(owner, name) for name in names) for owner in owners)
    }


def _has_weights(model: nn.Module, name: str, shared: Mapping[nn.Parameter, list[str]]) -> bool:
    return bool(set(model.get_submodule(name).parameters()) - _owned_further_out(shared, [name]))


def _fully_shard(
    model: nn.Module,
    names: list[str],
    shared: Mapping[nn.Parameter, list[str]],
    policy: ShardPolicy,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    is_root: bool,
) -> None:
    """Make `names` one group of parameters, gathered in `dtype`, its gradients summed in `policy.reduce`.

    The root keeps its parameters after forward whatever the policy says, since backward begins with them.
    """
    modules = [model.get_submodule(name) for name in names]
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if policy.cpu_offload else OffloadPolicy()
    fully_shard(
        modules,
        mesh=mesh,
        reshard_after_forward=False if is_root else policy.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=policy.reduce, cast_forward_inputs=False),
        offload_policy=offload,
        ignored_params=_owned_further_out(shared, names) or None,
    )
    # C1: gradients are summed, never averaged. The factor alone fails on gloo ("PREMUL_SUM").
    group = cast(FSDPModule, modules[0])
    group.set_gradient_divide_factor(1.0)
    group.set_force_sum_reduction_for_comms(True)
    Boundary(group)


def _gather_once(unit: nn.Module, head: nn.Module | None) -> None:
    """Keep a head gathered between its forward and its backward, which follows at once. The backward of nn.Embedding
    needs no weight."""
    if unit is head:
        cast(FSDPModule, unit).set_reshard_after_forward(False)
    elif type(unit).forward is nn.Embedding.forward:
        cast(FSDPModule, unit).set_unshard_in_backward(False)


def _require_sharded(model: nn.Module, shared: Mapping[nn.Parameter, list[str]]) -> None:
    for fqn, parameter in model.named_parameters():
        if parameter.dim() and not isinstance(parameter, DTensor):
            owners = shared.get(parameter, [fqn.rpartition(".")[0]])
            raise BackendError(
                f"backend native: expected one unit around {' and '.join(owners)}, which share the weight {fqn}, found "
                "a unit around each.\n  Leave these modules out of sharding.wrap_classes and sharding.wrap_modules, "
                "or set sharding.wrap=NO_WRAP."
            )


def reshard_all(root: nn.Module) -> None:
    """Leave the units as backward would have left them, after a forward that none follows."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
            if group is not None and hasattr(group.comm_ctx, "post_forward_order"):  # else it has never run
                # FSDP2 (2.9) notes forwards without gradients too, and would gather by that order in the next backward.
                group._post_forward_indices.clear()
                group.comm_ctx.post_forward_order.clear()


def _gather_order(
    model: nn.Module, policy: ShardPolicy, units: list[str], groups: Mapping[str, Mapping[torch.dtype, list[str]]]
) -> list[UnitGroup]:
    """The root and the units. One inside a recomputed layer, whose forward runs twice, goes along with the layer."""

    chain: list[UnitGroup] = []
    for name in (ROOT, *units):
        if any(_is_in(name, layer) for layer in policy.recompute):
            continue
        inner = [unit for unit in units if _is_in(unit, name)] if name in policy.recompute else []
        names = [group for unit in (name, *inner) for group in (unit, *(group[0] for group in groups[unit].values()))]
        unit, *inside = (cast(FSDPModule, model.get_submodule(group)) for group in names)
        chain.append(UnitGroup(unit, tuple(inside)))
    return chain


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers, with their values, before `shard_units`: fully_shard sets `.data`, which no TPU tensor takes."""
    for fqn, buffer in list(model.named_buffers(remove_duplicate=False)):
        if not buffer.is_meta:
            owner, _, leaf = fqn.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(device))


def materialise(model: nn.Module, policy: ShardPolicy, device: torch.device) -> None:
    """Memory for the parameters (on meta until now) where they rest."""
    rest_on = torch.device("cpu") if policy.cpu_offload else device
    for slots in parameter_slots(model).values():
        meta = cast(Any, slots[0].module)._parameters[slots[0].leaf]  # modules read scalars through a property
        if isinstance(meta, DTensor):
            continue
        weight = nn.Parameter(torch.empty_like(meta, device=rest_on), requires_grad=meta.requires_grad)
        for slot in slots:
            cast(Any, slot.module)._parameters[slot.leaf] = weight
    if not isinstance(model, FSDPModule):
        return

    def allocate(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return torch.empty_like(tensor, device=rest_on) if tensor.is_meta else tensor  # a tied one comes twice

    cast(Any, model)._apply(allocate)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its memory, not a copy; of torchao's tensors the master."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return cast(Any, local)._tensor if is_traceable_wrapper_subclass(local) else local


def require_unchanged(tensor: Tensor, version: int, shape: Sequence[int]) -> None:
    """torch's check that nothing changed a tensor which backward needs. It does none for tensors that hooks keep.

    `tensor`: any with the same count of changes in place, `version` when it was kept. Raises BackendError.
    """
    if tensor._version != version:
        raise BackendError(
            f"backend native: expected that no tensor changes while backward needs it, found one of shape {[*shape]} "
            "that the model's forward changed in place.\n  Compute a new tensor there: x = x * 2, not x.mul_(2)."
        )


class ComputeTime:
    """How long a process computes by itself: the forwards of training in the innermost units, inside FSDP2's hooks,
    which gather. (In backward the collectives of units wait for other processes.)"""

    def __init__(self, model: nn.Module, units: Sequence[str], device: torch.device) -> None:
        """Once the units are FSDP2's: the hooks run inside those that are there already."""
        self._is_cuda = device.type == "cuda"
        # Beginning and end of each forward, by step; the newest step last. A device has finished the one before it.
        self._steps = deque[list[Any]]([] for _ in range(1 + self._is_cuda))
        innermost = [name for name in units if not any(other.startswith(f"{name}.") for other in units)]
        for module in map(model.get_submodule, innermost or [""]):
            module.register_forward_pre_hook(self._mark)
            module.register_forward_hook(self._mark, prepend=True)

    def _mark(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # no evaluation
            mark: Any = torch.cuda.Event(enable_timing=True) if self._is_cuda else time.perf_counter()
            if self._is_cuda:
                mark.record()
            self._steps[-1].append(mark)

    def take(self) -> float:
        """Seconds of the last step; on CUDA of the one before it. NaN: none yet."""
        self._steps.append([])
        marks = self._steps.popleft()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        times = [begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin for begin, end in pairs]
        return sum(times) if times else math.nan


def cast_scalars(model: nn.Module, policy: ShardPolicy, device: torch.device) -> None:
    """Modules read their scalars in their compute dtype, on the device; the masters stay their parameters."""
    for name, module in model.named_modules():
        own = {leaf: weight for leaf, weight in module.named_parameters(recurse=False) if weight.dim() == 0}
        dtype = dtype_of(name, policy)
        floats = tuple(leaf for leaf, weight in own.items() if weight.is_floating_point())
        if floats and (policy.cpu_offload or any(own[leaf].dtype != dtype for leaf in floats)):
            module.__class__ = _casting(type(module), floats, dtype, device)


@cache  # equal layers keep an equal class, so that torch.compile makes one program for all of them
def _casting(
    kind: type[nn.Module], leaves: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> type[nn.Module]:
    """A subclass of the same name. No forward is replaced: a recomputed or compiled one casts too."""

    def reading(leaf: str) -> property:
        def read(module: nn.Module) -> torch.Tensor:
            weight = cast(Any, module)._parameters[leaf]
            # A loop that changes the weight between steps, without gradients, has to reach the weight itself.
            is_changed = module.training and not torch.is_grad_enabled()
            return weight if is_changed else weight.to(device, dtype)

        return property(read)

    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | {leaf: reading(leaf) for leaf in leaves})
