"""Whole tensors of sharded models on the host, and back."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from portable_fsdp.backends.contract import Backend, Piece
from portable_fsdp.checkpoint.named import Merged, has_layouts_of_its_own
from portable_fsdp.layout import Region
from portable_fsdp.runtime.errors import CheckpointError

_OURS = ("state_dict", "load_state_dict", "forward", "__deepcopy__", "__reduce_ex__")
"""Attributes of prepared modules, and of their blocks, that a whole copy on the host doesn't have."""
_HOOKS_OF_FSDP = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def whole(engine: Backend, model: nn.Module, tensors: Iterable[Tensor], keep: bool) -> dict[Tensor, Tensor]:
    """Tensor of a sharded model -> a whole copy on the host; with `keep` false the others' part alone. *collective*"""
    engine.end_step()
    split = engine.state(model, Merged({})) if has_layouts_of_its_own(engine) else {}
    names = {tensor: name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    copies: dict[Tensor, Tensor] = {}
    for tensor in dict.fromkeys(tensors):
        if (state := split.get(names.get(tensor, ""))) is not None:
            value = _from_pieces(engine, state.shape, tensor.dtype, state.pieces())
        elif isinstance(tensor, DTensor):
            value = cast(DTensor, tensor.detach().to(engine.device)).full_tensor()
        elif tensor.device.type == "xla":  # its parts: reading a sharded tensor would compile a program
            value = _from_pieces(engine, tensor.shape, tensor.dtype, engine.tensor_state(tensor).pieces())
        else:
            value = tensor
        if keep:
            copies[tensor] = value.detach().to("cpu", copy=True)
    return copies


def _from_pieces(engine: Backend, shape: Iterable[int], dtype: torch.dtype, pieces: Iterable[Piece]) -> Tensor:
    own = [(piece.offset, piece.data.cpu()) for piece in pieces if not piece.replica]
    value = torch.empty([*shape], dtype=dtype)
    for offset, data in (each for part in engine.gather(own) for each in part):
        value[tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))] = data
    return value


def layouts(engine: Backend, model: nn.Module) -> dict[Tensor, tuple[str, tuple[int, ...]]]:
    """Weight or buffer of a checkpoint -> its first name, and its shape on one device."""
    states = engine.state(model, Merged({}))
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {tensors[name]: (name, state.shape) for name, state in states.items()}


def put_whole(engine: Backend, model: nn.Module, values: Mapping[Tensor, Tensor]) -> None:
    """Overwrite tensors of a sharded model by whole ones, which each process has. Raises CheckpointError."""
    engine.end_step()
    known = layouts(engine, model)
    named = {
        known[tensor][0]: value.full_tensor() if isinstance(value, DTensor) else value.detach()
        for tensor, value in values.items()
        if tensor in known
    }

    def read(key: str, slices: Region, into: Tensor | None = None) -> Tensor:
        part = named[key][slices].cpu()
        return part.to(dtypes[key], copy=True) if into is None else into.copy_(part)

    dtypes = {name: tensor.dtype for tensor, (name, _) in known.items()}
    with torch.no_grad():
        if len(named) == len(known):
            engine.load_state(model, Merged({}), read)
            return
        if has_layouts_of_its_own(engine):
            raise CheckpointError(
                "load_state_dict: a part of a model's weights, with sharding.tensor or sharding.expert.\n"
                "  Load all of its weights in one call."
            )
        for tensor, (name, _) in known.items():
            if name in named:
                engine.load_tensor(tensor, partial(read, name))


def with_own_tensors(
    engine: Backend, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A state with whole tensors, as one whose tensors lie where the optimizer's lie. `prepare` has allocated these, or
    a step; else torch places them."""
    engine.end_step()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = {number: dict(values) for number, values in state_dict["state"].items()}
    for number, weight in zip(numbers, weights, strict=False):  # torch says it of other groups
        for key, value in state.get(number, {}).items():
            own = optimizer.state.get(weight, {}).get(key)
            if isinstance(value, DTensor) or not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if isinstance(own, Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    engine.load_tensor(own, partial(_slice, value))
                state[number][key] = own
            elif isinstance(weight, DTensor) and weight.shape == value.shape:
                mesh, placements = weight.device_mesh, weight.placements
                state[number][key] = distribute_tensor(value, mesh, placements, src_data_rank=None)
    return {**state_dict, "state": state}


def _slice(value: Tensor, slices: Region) -> Tensor:
    return value[slices]


def copy_of(module: nn.Module, values: Mapping[Tensor, Tensor], known: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy on the host with these values: of the same class, and with the same config objects."""
    if module not in known:
        known[module] = copy = object.__new__(type(module))
        own = {name: value for name, value in vars(module).items() if name not in _OURS}
        for name in own:
            if name.startswith(("_forward_", "_backward_")) and isinstance(own[name], dict):  # hooks of the engine
                own[name] = OrderedDict[int, Any]()
        own["_parameters"] = {
            name: p if p is None else _parameter(p, values) for name, p in vars(module)["_parameters"].items()
        }
        own["_buffers"] = {name: b if b is None else values[b] for name, b in vars(module)["_buffers"].items()}
        own["_modules"] = {
            name: m if m is None else copy_of(m, values, known) for name, m in vars(module)["_modules"].items()
        }
        vars(copy).update(own)
    return known[module]


def in_own_classes(copy: nn.Module) -> nn.Module:
    """Give a copy the classes that FSDP replaced, and take FSDP's state and hooks out: so it can be pickled."""
    for module in copy.modules():
        vars(module).pop(STATE_KEY, None)
        for name in _HOOKS_OF_FSDP:
            hooks = vars(module)[name].items()
            kept = {key: hook for key, hook in hooks if "torch.distributed.fsdp" not in getattr(hook, "__module__", "")}
            vars(module)[name] = OrderedDict(kept)
        if isinstance(module, FSDPModule):
            module.__class__ = next(kind for kind in type(module).__mro__[1:] if not issubclass(kind, FSDPModule))
    return copy


def _parameter(old: nn.Parameter, values: Mapping[Tensor, Tensor]) -> nn.Parameter:
    value = values[old]
    if not isinstance(value, nn.Parameter):
        cast(Any, values)[old] = value = nn.Parameter(value, old.requires_grad)  # tied ones stay so
    return value
