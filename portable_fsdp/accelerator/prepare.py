"""Models and optimizers of a script: built as for one device, laid out over all of them."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.nested import floats_in
from portable_fsdp.backends.state import parameter_slots, put_parameter
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import Region
from portable_fsdp.models.weights import DTYPES
from portable_fsdp.runtime.errors import BackendError, ConfigError
from portable_fsdp.train.build import shard_model, shard_policy


class Twins:
    """The parameters that a script knows -> the sharded ones that replaced them."""

    def __init__(self) -> None:
        self._new: dict[Tensor, nn.Parameter] = {}
        self.models: list[nn.Module] = []

    def has(self, model: object) -> bool:
        """Whether an Accelerator of this engine has sharded the model."""
        return any(model is each for each in self.models)

    def add(self, old: Tensor, new: nn.Parameter) -> None:
        self._new[old] = new

    def lacks(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has weights of a model that isn't prepared yet."""
        known = {*self._new, *self._new.values()}
        return any(weight not in known for group in optimizer.param_groups for weight in group["params"])

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [self._new.get(parameter, parameter) for parameter in parameters]


def prepare_model(model: nn.Module | Callable[[], nn.Module], config: Config, engine: Backend, twins: Twins) -> Any:
    """Shard a model in place, with its values on process 0, or one that a function makes. *collective*

    A built model has been in the memory of each process; a function runs on the meta device, and no process has all of
    it. Raises ConfigError for a model that can't be laid out.
    """
    if not isinstance(model, nn.Module):
        made = shard_model(model, config, engine)
        for weight in made.parameters():
            twins.add(weight, weight)
        twins.models.append(made)
        return made
    name = type(model).__name__
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ConfigError(f"prepare: the model is a {name}.\n  Pass the model itself: model.module.")
    if hasattr(model, "_orig_mod"):
        raise ConfigError(f"prepare: {name} is compiled.\n  Leave torch.compile out: compile={{'enabled': True}}.")
    if engine.device.type == "xla":
        _refuse_recomputing(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(_narrow, with_kwargs=True)
    if getattr(model, "hf_device_map", None) and len({*cast(Any, model).hf_device_map.values()}) > 1:
        raise ConfigError(f"prepare: {name} lies on several devices (device_map).\n  Load it without device_map.")
    _initialise(model)
    olds, values = dict[str, nn.Parameter](), dict[str, Tensor]()
    for fqn, slots in parameter_slots(model).items():
        olds[fqn] = old = cast(nn.Parameter, cast(Any, slots[0].module)._parameters[slots[0].leaf])
        if isinstance(old, nn.parameter.UninitializedParameter):
            raise ConfigError(f"prepare: {fqn}, a parameter of a lazy module, has no shape.\n  Specify its sizes.")
        values[fqn] = old.detach().cpu()
        put_parameter(slots, old.detach().to("meta"), old.requires_grad)
    on_host = {buffer: buffer.cpu() for buffer in model.buffers()}
    for module in model.modules():
        buffers = cast(Any, module)._buffers
        buffers.update({name: on_host[buffer] for name, buffer in buffers.items() if buffer is not None})
    if engine.process.count > 1 and engine.device.type != "xla":
        for value in [*values.values(), *model.buffers()]:
            dist.broadcast(value, src=0)
    dtype = DTYPES.get(config.precision.buffers)
    for buffer in model.buffers():
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    if (output := DTYPES.get(config.precision.output)) is not None:
        model.register_forward_hook(lambda _, __, value: floats_in(output)(value))

    def fill(fqn: str, slices: Region) -> Tensor:
        return values[fqn][slices].clone()

    engine.shard_model(model, shard_policy(config, model), fill)
    # peft's generate runs the inner model alone; a model with injected adapters may have none.
    if isinstance(model, FSDPModule) and hasattr(model, "peft_config") and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    for fqn, weight in model.named_parameters():
        twins.add(olds[fqn], weight)
        olds[fqn].data = torch.empty(
            0, dtype=weight.dtype, device=olds[fqn].device
        )  # frees its memory: the script may hold the object
    twins.models.append(model)
    return model


def _refuse_recomputing(model: nn.Module) -> None:
    """Raise ConfigError where a model recomputes by torch's checkpointing, now or once it is switched on."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(
            f"{type(model).__name__} would recompute by torch's checkpointing, which XLA undoes.\n  Leave "
            "gradient_checkpointing_enable() out: Accelerator(memory={'gradient_checkpointing': 'full'})."
        )

    flag = "is_activation_checkpointing"  # until transformers 5.23: is_gradient_checkpointing
    if getattr(model, flag if hasattr(model, flag) else "is_gradient_checkpointing", False):
        refuse()
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            setattr(model, name, refuse)


def _narrow(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """XLA ends the process at the gradient of an embedding by int64 `[rows]`, if the devices don't divide the rows."""
    ids = args[0] if args else kwargs.get("input")
    return ((ids.int(),), {}) if isinstance(ids, Tensor) and ids.dim() == 1 else (args, kwargs)


def _initialise(model: nn.Module) -> None:
    """Give values to modules on the meta device, as FSDP does: by their `reset_parameters`."""
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in tensors):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"prepare: {name or type(module).__name__} is on the meta device, and has no reset_parameters.\n"
                "  Pass the function that makes the model: prepare(lambda: Model()), or load its values first."
            )
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            reset()


def prepare_optimizer(optimizer: torch.optim.Optimizer, engine: Backend, twins: Twins) -> None:
    """Let an optimizer of the script step the sharded weights. Its groups stay: schedulers know them. *collective*"""
    kind = type(optimizer)
    for group in optimizer.param_groups:
        group["params"] = twins.of(group["params"])
        if any(isinstance(weight, DTensor) or weight.device.type == "xla" for weight in group["params"]) and any(
            base.__module__.startswith("bitsandbytes.") for base in kind.__mro__
        ):
            raise ConfigError(
                f"prepare: {kind.__name__} of bitsandbytes steps whole weights, on one device of native.\n  Take "
                "torch's AdamW (Trainer's optim='adamw_torch')."
            )
    for parameter in [*optimizer.state]:  # made early, by torch's Adagrad
        (twin,) = twins.of([parameter])
        optimizer.state[twin] = optimizer.state.pop(parameter)
    try:
        engine.shard_optimizer(optimizer)
    except BackendError as error:
        raise BackendError(
            str(error).replace("shard_optimizer", "prepare").replace("Shard the", "Prepare the")
        ) from None
