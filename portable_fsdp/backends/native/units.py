"""Turn a model into FSDP2 units: the weights gathered together, their dtype, and recomputation and compilation inside.

`shard_units` reads top to bottom in the order in which the techniques apply: casts around modules of another dtype,
gradient checkpointing, compilation of the result, then the units, inner ones first, and the root around them. It
replaces forwards of instances and adds hooks; no wrapper changes a name.
"""

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from portable_fsdp.backends.contract import Forward, ShardPolicy
from portable_fsdp.backends.nested import Replacement, are_cast, flatten, floats_in
from portable_fsdp.backends.state import output_head, parameter_slots, put_parameter
from portable_fsdp.backends.weight_uses import (
    dtype_of,
    eight_bit_layers,
    in_own_dtype,
    uses_by_block,
    weight_uses,
)
from portable_fsdp.runtime.errors import BackendError, ConfigError

log = logging.getLogger("portable_fsdp")

ROOT = ""
COLLECTIVES: Mapping[str, str] = {  # torch's name -> the contract's
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
}

# If SDPA has no kernel for its arguments (grouped heads on CPU), it runs as batched products and a softmax. These don't
# count as "attention", or the experts' products would be kept with it.
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
    """A unit and the groups inside it that are gathered with it: prefetching counts in these."""

    unit: FSDPModule
    inside: tuple[FSDPModule, ...]


def shard_units(
    model: nn.Module, policy: ShardPolicy, mesh: DeviceMesh, of_experts: DeviceMesh | None, device: torch.device
) -> list[UnitGroup]:
    """Make `model` (parameters on meta) and its units FSDP2 modules over `mesh`, 1-D or after the dimension
    "replicate", to compute on `device`; return the root and the units in definition order.

    A unit's parameters are gathered in one dtype over one mesh, so inner modules that compute in another one form their
    own group, and so do experts, whose weights lie over `of_experts` (None: over `mesh`, as all others). A weight that
    several modules share belongs to the unit that holds them all; raises BackendError if none does. 0-dim weights
    belong to no unit.
    """
    shared = _shared_weights(model)
    parameters = {name: {*model.get_submodule(name).parameters()} for name in policy.units}
    units = [name for name in policy.units if parameters[name] - _owned_further_out(shared, [name])]
    experts = policy.experts if of_experts else ()
    groups = _groups(policy, units, experts)
    cast_modules(model, policy)
    cast_scalars(model, policy, device)
    prepare_layers(model, policy, (*units, *policy.modules, *experts))
    for name in (*reversed(units), ROOT):
        for names in (*groups[name], [name]):
            over, dim = (of_experts, 1) if of_experts and names[0] in experts else (mesh, 0)
            _fully_shard(model, names, shared, policy, over, is_root=name == ROOT, dim=dim)
        if policy.cast_inputs:
            cast_inputs(model.get_submodule(name), dtype_of(name, policy))
    _require_sharded(model, shared)
    for name in units:
        _gather_once(model.get_submodule(name), output_head(model))
    return _gather_order(model, policy, units, groups)


def _is_in(name: str, outer: str) -> bool:
    return outer == ROOT != name or name.startswith(f"{outer}.")


# ------------------------------------------------------------------------------------------------------- the dtypes


def _groups(policy: ShardPolicy, units: list[str], experts: Sequence[str]) -> dict[str, list[list[str]]]:
    """Unit -> the groups of modules inside it: one for each other dtype than the unit's, and one for each module of
    `experts`."""
    groups: dict[str, dict[str | torch.dtype, list[str]]] = {name: {} for name in (*units, ROOT)}
    for name in dict.fromkeys((*experts, *policy.modules)):
        # The innermost unit around the module; the root holds all.
        unit = max((unit for unit in units if _is_in(name, unit)), key=len, default=ROOT)
        dtype, is_experts = dtype_of(name, policy), name in experts
        if name not in units and (is_experts or dtype != dtype_of(unit, policy)):
            groups[unit].setdefault(name if is_experts else dtype, []).append(name)
    return {unit: [*inner.values()] for unit, inner in groups.items()}


def cast_modules(model: nn.Module, policy: ShardPolicy) -> None:
    """Cast the inputs of modules of another dtype to it, and their outputs back (but for the head's). FSDP2 wouldn't:
    of a list of modules, it casts for the first only."""
    head = output_head(model)
    for name, dtype in policy.modules.items():
        module = model.get_submodule(name)
        if module is head:
            cast_inputs(module, dtype)
        else:  # no hooks: they have ids, for which torch.compile would make a program for each layer
            module.forward = MethodType(_in_own_dtype(forward_of(module), dtype, policy.compute), module)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast inputs by hooks. A list or an object that the module changes is changed for its caller too."""
    running: list[Replacement | None] = []

    def cast_all(_: nn.Module, args: Any, kwargs: Any) -> Any:
        running.append(cast := None if are_cast((*args, *kwargs.values()), dtype) else floats_in(dtype))
        return cast((args, kwargs)) if cast else None

    module.register_forward_pre_hook(cast_all, with_kwargs=True)
    # Before FSDP2's hook, at which Boundary writes back too.
    module.register_forward_hook(
        lambda *_: cast.write_back() if running and (cast := running.pop()) else None, prepend=True, always_call=True
    )


def forward_of(module: nn.Module) -> Forward:
    """Return the forward of its class, or its replacement, taking the module first: equal for equal layers."""
    forward = module.forward
    return forward.__func__ if isinstance(forward, MethodType) else lambda _, *args, **named: forward(*args, **named)


_in_own_dtype = cache(in_own_dtype)  # equal layers get the same function


def use_float8(model: nn.Module, policy: ShardPolicy, device: torch.device, shards: int) -> Callable[[], None]:
    """Convert linear layers to torchao's float8 products before anything is wrapped; return the function to call when
    weights have changed. Raises ConfigError without torchao.

    Names, masters and checkpoints don't change (`local_part`). Under `float8` a shard is cast before the gather, with
    the scale of the whole weight. One all-reduce after each step computes the scales of all weights.
    """
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise ConfigError(
            f"precision.products={policy.products}: can't import the package torchao: {error}.\n"
            "  pip install torchao (with torch 2.9: pip install 'torchao<0.18'), or set precision.products=auto."
        ) from None
    is_gpu, torchao = device.type == "cuda", cast(Any, float8)
    is_emulated = not is_gpu or torch.cuda.get_device_capability(device) < (8, 9)
    if is_gpu and is_emulated:
        log.warning("precision.products: %s has no float8: emulating it, which is slow", torch.cuda.get_device_name())
    names = frozenset(eight_bit_layers(model, policy))
    # gloo can't gather float8; together with weights of another dtype FSDP2 gathers bytes.
    linear = {*map(model.get_submodule, names)}
    alone = any(
        uses and all(use.module in linear for use in uses if use.dtype == policy.compute)
        for uses in uses_by_block(weight_uses(model, policy), policy.units).values()
    )
    gathers = policy.products == "float8" and shards > 1 and (is_gpu or not alone)
    recipe = torchao.Float8LinearConfig.from_recipe_name("tensorwise" if policy.products == "float8" else "rowwise")
    # Float8 products sum over a multiple of 16 elements; for a weight's gradient these are tokens.
    settings = dataclasses.replace(
        recipe, emulate=is_emulated, enable_fsdp_float8_all_gather=gathers, pad_inner_dim=not is_emulated
    )
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=settings)
    return lambda: torchao.precompute_float8_dynamic_scale_for_fsdp(model) if gathers else None


# -------------------------------------------------------------------------------------- recomputation, compilation


def prepare_layers(model: nn.Module, policy: ShardPolicy, places: Sequence[str]) -> None:
    """Put layers under gradient checkpointing, and compile them. `places`: modules whose hooks break a graph."""
    for name in dict.fromkeys((*policy.recompute, *policy.layers)):
        prepare_layer(model, policy, name, holds_units=any(_is_in(inner, name) for inner in places))


def prepare_layer(
    model: nn.Module, policy: ShardPolicy, name: str, *, holds_units: bool = False, forward: Forward | None = None
) -> None:
    """Put one layer under gradient checkpointing, and compile it with static shapes, without its hooks.

    Hooks of inner units break the graph. `forward`: what is recomputed, in place of the layer's own.
    """
    layer, compiler = model.get_submodule(name), policy.compile_backend if name in policy.layers else None
    # torch.compile can't trace the counts of dropouts inside a checkpoint, so the checkpoint goes around.
    is_outside = policy.draws is not None and compiler is not None
    if name in policy.recompute and not is_outside:
        recompute(layer, policy, whole=holds_units, forward=forward)
    if compiler is not None:
        # torch's default is inductor; torch_tpu makes its own compiler the default.
        options: dict[str, Any] = {} if compiler == "auto" else {"backend": compiler}
        layer.forward = torch.compile(layer.forward, **options, fullgraph=not holds_units, dynamic=False)
    if name in policy.recompute and is_outside:
        recompute(layer, policy, whole=holds_units, forward=forward_of(layer))


def require_saved_ops(policy: ShardPolicy, *, compiles: bool) -> None:
    """Raise BackendError for `memory.save_ops` in layers that can't keep the outputs of single operations."""
    if policy.draws is not None and policy.save_ops and compiles:
        raise BackendError(
            "memory.save_ops: a compiled layer with dropout is recomputed as a whole.\n"
            "  Set memory.save_ops=[], compile.enabled=false, memory.gradient_checkpointing=budget, or model.dropout=0."
        )


def recompute(layer: nn.Module, policy: ShardPolicy, *, whole: bool, forward: Forward | None = None) -> None:
    """Put a layer under gradient checkpointing. `forward(layer, ...)` runs in place of its forward."""
    require_saved_ops(policy, compiles=policy.compile_backend is not None)
    make = _recomputed.__wrapped__ if forward else _recomputed  # the cache would keep the layer alive
    layer.forward = MethodType(make(forward or forward_of(layer), policy.save_ops, whole), layer)


@cache  # equal layers get the same function, so that torch.compile makes one program for all of them
def _recomputed(forward: Forward, save_ops: tuple[str, ...], whole: bool) -> Forward:
    """Put a layer's `forward` under gradient checkpointing; keep the outputs of `save_ops`.

    Recomputation restores torch's generators: any layer may draw.
    `whole`: recompute all of it. By default torch stops recomputation at the last tensor that backward needs, by an
    exception, which would leave a unit inside the layer in the middle of its forward.
    """
    options: dict[str, Any] = {"use_reentrant": False, "early_stop": not whole}
    if save_ops:
        kept = [getattr(torch.ops.aten, name).default for kind in save_ops for name in _OPS[kind]]
        if "attention" in save_ops and (flex := getattr(torch.ops.higher_order, "flex_attention", None)) is not None:
            kept.append(flex)  # in compiled layers only: elsewhere it is compiled separately
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(forward, self, *args, **options, **kwargs)
        first = [(args, kwargs)]  # the caller sees what the layer changes in them
        tensors, unflatten = flatten((args, kwargs))
        del args, kwargs  # autograd's hooks decide where the inputs of the recomputation are

        def forward_of_tensors(*tensors: Tensor) -> Any:
            args, kwargs = first.pop() if first else unflatten(tensors)
            return forward(self, *args, **kwargs)

        return checkpoint(forward_of_tensors, *tensors, **options)

    return run


# -------------------------------------------------------------------------------------------------------- the units


def _shared_weights(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Tied weight or scalar -> FQNs of the modules that hold it."""
    names = {module: name for name, module in model.named_modules()}
    return {
        model.get_parameter(fqn): [names[place.module] for place in places]
        for fqn, places in parameter_slots(model).items()
        if len(places) > 1 or model.get_parameter(fqn).dim() == 0
    }


def _owned_further_out(shared: Mapping[nn.Parameter, list[str]], names: list[str]) -> set[nn.Parameter]:
    """The tied weights that modules outside `names` hold too, which belong to an outer unit; and scalars, to none."""
    return {
        weight
        for weight, owners in shared.items()
        if weight.dim() == 0 or not all(any(owner == name or _is_in(owner, name) for name in names) for owner in owners)
    }


def _fully_shard(
    model: nn.Module,
    names: list[str],
    shared: Mapping[nn.Parameter, list[str]],
    policy: ShardPolicy,
    mesh: DeviceMesh,
    is_root: bool,
    dim: int,
) -> None:
    """Make `names` one group of parameters, gathered in their compute dtype, with gradients summed in `policy.reduce`,
    and sharded along their dimension `dim`.

    The root's parameters stay gathered after forward whatever the policy says, since backward begins with them.
    """
    modules = [model.get_submodule(name) for name in names]
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if policy.cpu_offload else OffloadPolicy()
    fully_shard(
        modules,
        mesh=mesh,
        reshard_after_forward=False if is_root else policy.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(dtype_of(names[0], policy), policy.reduce, cast_forward_inputs=False),
        offload_policy=offload,
        shard_placement_fn=(lambda _: Shard(dim)) if dim else None,
        ignored_params=_owned_further_out(shared, names) or None,
    )
    # C1: gradients are summed, never averaged. The factor alone fails on gloo ("PREMUL_SUM").
    group = cast(FSDPModule, modules[0])
    group.set_gradient_divide_factor(1.0)
    group.set_force_sum_reduction_for_comms(True)
    from portable_fsdp.backends.native.boundary import Boundary  # a run without shards needs none

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
                f"backend native: {' and '.join(owners)} share the weight {fqn}, but are in different units.\n"
                "  Leave these modules out of sharding.wrap_classes and sharding.wrap_modules, or set "
                "sharding.wrap=NO_WRAP."
            )


def reshard_all(units: Iterable[FSDPModule]) -> None:
    """Reshard all units after a forward without backward, as backward would."""
    for unit in units:
        group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        if group is not None and group._all_gather_result is not None:  # gathered ahead, but not used
            group.wait_for_unshard()
        unit.reshard()
        if group is not None and hasattr(group.comm_ctx, "post_forward_order"):  # else it has never run
            # FSDP2 (2.9) records forwards without gradients too: the next backward would prefetch in that order.
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def _gather_order(
    model: nn.Module, policy: ShardPolicy, units: list[str], groups: Mapping[str, list[list[str]]]
) -> list[UnitGroup]:
    """Return the root and the units. Units inside a recomputed layer, which runs twice, are gathered with it."""
    chain: list[UnitGroup] = []
    for name in (ROOT, *units):
        if any(_is_in(name, layer) for layer in policy.recompute):
            continue
        inner = [unit for unit in units if _is_in(unit, name)] if name in policy.recompute else []
        names = [group for unit in (name, *inner) for group in (unit, *(group[0] for group in groups[unit]))]
        unit, *inside = (cast(FSDPModule, model.get_submodule(group)) for group in names)
        chain.append(UnitGroup(unit, tuple(inside)))
    return chain


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers, with their values, before `shard_units`: fully_shard sets `.data`, which TPU tensors refuse."""
    for fqn, buffer in list(model.named_buffers(remove_duplicate=False)):
        if not buffer.is_meta:
            owner, _, leaf = fqn.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(device))


def materialise(model: nn.Module, policy: ShardPolicy, device: torch.device) -> None:
    """Allocate the parameters (on meta until now): on the host with cpu_offload, else on `device`."""
    rest_on = torch.device("cpu") if policy.cpu_offload else device
    for slots in parameter_slots(model).values():
        meta = cast(Any, slots[0].module)._parameters[slots[0].leaf]  # modules read scalars through a property
        if not isinstance(meta, DTensor):
            put_parameter(slots, torch.empty_like(meta, device=rest_on), meta.requires_grad)
    if not isinstance(model, FSDPModule):
        return

    def allocate(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return torch.empty_like(tensor, device=rest_on) if tensor.is_meta else tensor  # a tied one comes twice

    cast(Any, model)._apply(allocate)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: its memory, not a copy; for torchao's tensors the master."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return cast(Any, local)._tensor if is_traceable_wrapper_subclass(local) else local


def require_unchanged(tensor: Tensor, version: int, shape: Sequence[int]) -> None:
    """Check, as torch does, that a tensor that backward needs has not changed. torch skips tensors kept by hooks.

    `tensor`: any that shares its count of in-place changes, `version` when it was kept. Raises BackendError.
    """
    if tensor._version != version:
        raise BackendError(
            f"backend native: the model's forward changed a tensor of shape {[*shape]} in place, but backward needs "
            "its old value.\n  Compute a new tensor there: x = x * 2, not x.mul_(2)."
        )


class ComputeTime:
    """Time that a process computes by itself: training forwards of the innermost units, inside FSDP2's hooks, which
    gather. (In backward the collectives of units wait for other processes.)"""

    def __init__(self, model: nn.Module, units: Sequence[str], device: torch.device) -> None:
        """Create it after the units are FSDP2's: the hooks run inside the existing ones."""
        self._is_cuda, self._is_read = device.type == "cuda", False
        # Start and end of each forward, by step; the newest step last. A GPU has finished the step before it.
        self._steps = deque[list[Any]]([] for _ in range(1 + self._is_cuda))
        innermost = [name for name in units if not any(other.startswith(f"{name}.") for other in units)]
        for module in map(model.get_submodule, innermost or [""]):
            module.register_forward_pre_hook(self._mark)
            module.register_forward_hook(self._mark, prepend=True)

    def _mark(self, *_: Any) -> None:
        if self._is_read and torch.is_grad_enabled():  # not in evaluation
            mark: Any = torch.cuda.Event(enable_timing=True) if self._is_cuda else time.perf_counter()
            if self._is_cuda:
                mark.record()
            self._steps[-1].append(mark)

    def take(self) -> float:
        """Return the seconds of the last step; on CUDA of the step before it. NaN: none yet."""
        self._is_read = True  # a loop that never calls this would keep all times
        self._steps.append([])
        marks = self._steps.popleft()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        times = [begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin for begin, end in pairs]
        return sum(times) if times else math.nan


def cast_scalars(model: nn.Module, policy: ShardPolicy, device: torch.device) -> None:
    """Make modules read their scalars in their compute dtype, on the device; their parameters stay the masters."""
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
    """Return a subclass of the same name that casts on read, so that recomputed and compiled forwards cast too."""

    def reading(leaf: str) -> property:
        def read(module: nn.Module) -> torch.Tensor:
            weight = cast(Any, module)._parameters[leaf]
            # A loop that changes the weight between steps, without gradients, must get the weight itself.
            is_changed = module.training and not torch.is_grad_enabled()
            return weight if is_changed else weight.to(device, dtype)

        return property(read)

    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | {leaf: reading(leaf) for leaf in leaves})
