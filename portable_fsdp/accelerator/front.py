"""`portable_fsdp.Accelerator`: accelerate's, whose scripts then train sharded on FSDP2 and on XLA.

The constructor opens an engine and fills accelerate's states by it (`state.py`); what accelerate does right by these
states is inherited. `names.yaml` says of each public name which of both it is, or why it is refused.
"""

# pyright: reportPrivateUsage=false

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import accelerate
import torch
import yaml
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, concatenate, recursively_apply, send_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from portable_fsdp.accelerator.prepare import prepare_model, prepare_optimizer
from portable_fsdp.accelerator.rows import PreparedLoader, PreparedStream, Shards
from portable_fsdp.accelerator.saving import Saving, StateError
from portable_fsdp.accelerator.start import start_workers
from portable_fsdp.accelerator.state import close, end_with_a_sentence, fill_states, open_engine, plugin_of
from portable_fsdp.accelerator.watch import HostReads, WholeCopies
from portable_fsdp.accelerator.whole import with_own_tensors
from portable_fsdp.checkpoint.named import has_layouts_of_its_own
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import ConfigError


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper: a step and zero_grad do something where gradients are complete."""

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: "Accelerator") -> None:
        super().__init__(optimizer, device_placement=False)
        self._of, self._number = accelerator, accelerator._saving.adopt_optimizer(self)
        self.steps, self._had_state = 0, bool(optimizer.state)  # torch's Adagrad has some
        self.waits = accelerator._twins.lacks(optimizer)  # for its model to be prepared

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors, where the state is sharded. All processes call it, or process 0 alone. State that `prepare`
        allocated shows after the first step, as that of an unprepared optimizer."""
        state = self.optimizer.state_dict()
        if not self.steps and not self._had_state:
            return {**state, "state": {}}
        tensors = [value for values in state["state"].values() for value in values.values()]
        is_sharded = any(isinstance(value, DTensor) or getattr(value, "is_xla", False) for value in tensors)
        return self._of._saving.optimizer_state(self._number) if is_sharded else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, on each process."""
        self.optimizer.load_state_dict(with_own_tensors(self._of.engine, self.optimizer, state_dict))
        self._had_state = self._had_state or bool(state_dict["state"])

    def step(self, closure: Any = None) -> None:
        if self.waits:
            kind = type(self.optimizer).__name__
            raise ConfigError(f"step: {kind} has weights of a model that isn't prepared.\n  Prepare the model too.")
        if self.gradient_state.sync_gradients:
            self._of._begin_work()
            self._of._saving.forget_puts()
            self.steps += 1
            self.optimizer.step(closure) if closure is not None else self.optimizer.step()
            self._of._copies.begin()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients and not self.waits:
            self._of._begin_work()
            keep = self._of._keeps_gradients or set_to_none is False
            self._of.engine.zero_gradients(self.optimizer, keep=keep)
            self._of._copies.begin()


class Accelerator(accelerate.Accelerator):
    """accelerate's class on this library's engines; a script changes the import.

    Besides accelerate's arguments: `config`, a YAML file of our sections, or sections as keywords (`sharding={...}`);
    `device`, `backend` and `num_devices` as for `open_backend`; `processes="one"`: on XLA `num_processes` is 1, and a
    loader's batch is that of all devices; `autocast`: bf16 as accelerate computes it, by torch.autocast, in place of
    weights cast unit by unit. Raises ConfigError for arguments that the engines can't honour.
    """

    def __init__(
        self,
        *args: Any,
        config: str | os.PathLike[str] | None = None,
        device: str = "auto",
        backend: str = "auto",
        num_devices: int | None = None,
        processes: Literal["devices", "one"] = "devices",
        autocast: bool = False,
        **kwargs: Any,
    ) -> None:
        _close_names()
        if sys.excepthook is sys.__excepthook__:  # a notebook has its own
            sys.excepthook = end_with_a_sentence
        sections = {name: kwargs.pop(name) for name in [*kwargs] if name in Config.model_fields}
        given = _by_name(args, kwargs)
        fsdp = given.pop("fsdp_plugin", None)
        if given.pop("cpu", False) or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
            device = "cpu"
        precision = str(given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
        refuse_arguments(given, precision, processes)
        if precision == "bf16" and not autocast:
            cast_ = {"compute": "bfloat16", "output": "float32"}
            sections["precision"] = cast_ | dict(sections.get("precision") or {})
        plugin = given.get("gradient_accumulation_plugin")
        steps: Any = plugin.num_steps if plugin is not None else given.get("gradient_accumulation_steps", 1)
        start = {"device": device, "backend": backend, "num_devices": num_devices}
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"Accelerator: gradient_accumulation_steps={steps}: expected an integer, at least 1.")
        start_workers(start)
        self._opened = open_engine(config, sections, start, steps, processes, fsdp)
        self.engine = self._opened.engine
        if self._opened.config.precision.compute == "bfloat16" and precision == "no":
            given["mixed_precision"] = "bf16"
        fill_states(self._opened, self.wait_for_everyone)
        super().__init__(**given)
        if given.get("split_batches") in (True, False):  # accelerate 1.15 takes the argument, and drops it
            self.dataloader_config.split_batches = given["split_batches"]
        if self.dispatch_batches and self.engine.device.type == "xla":
            raise ConfigError("Accelerator: dataloader_config: dispatch_batches isn't built on XLA.\n  Leave it out.")
        if self.distributed_type == DistributedType.FSDP:
            self.state.fsdp_plugin = plugin_of(self._opened)
        self._twins, self._graphs = self._opened.twins, self._opened.graphs
        self._autocast, self._defers = autocast and precision == "bf16", False
        self._reads, self._is_whole = HostReads(), False  # is_whole: inside of `step_function`'s
        self._pending_log: Callable[[], None] = lambda: None
        self._saving = Saving(self, self.engine, self._opened.config)
        self._copies = WholeCopies(self._saving.put)
        atexit.register(lambda: self._pending_log())  # a script may end without end_training

    # -------------------------------------------------------------------------------------------------- what it is

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.XLA if self.engine.device.type == "xla" else self.state.distributed_type

    @property
    def is_last_process(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.engine.process.index == self.engine.process.count - 1

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def _keeps_gradients(self) -> bool:
        """Whether gradients stay, zeroed: as inputs, so that a micro batch is the same program each time."""
        return self.engine.device.type == "xla" and self.gradient_accumulation_steps > 1

    # ----------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order, in one call or several. *collective*"""
        done = {at: self.prepare_model(each) for at, each in enumerate(args) if _makes_model(each)}
        for kind, prepare in (
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
            (torch.optim.lr_scheduler.LRScheduler, self.prepare_scheduler),
        ):
            done |= {at: prepare(each) for at, each in enumerate(args) if at not in done and isinstance(each, kind)}
        results = tuple(done.get(at, each) for at, each in enumerate(args))
        return results if len(results) != 1 else results[0]

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if model in self._models:
            raise ConfigError(f"prepare: this {type(model).__name__} is prepared already: prepare it once.")
        if self._saving.knows(model):  # free_memory has taken it off the list; it stays sharded
            return _added(model, self._models)
        if not self._twins.has(model):  # else another Accelerator has prepared it
            model = prepare_model(model, self._opened.config, self.engine, self._twins)
            self._graphs.watch(model)
            if self._autocast:
                model.forward = _in_autocast(model.forward, self.engine.device.type)
        if not has_layouts_of_its_own(self.engine):
            self._copies.watch(model)
        self._saving.adopt(model)
        for prepared in self._optimizers:
            if getattr(prepared, "waits", False) and not self._twins.lacks(prepared.optimizer):
                prepare_optimizer(prepared.optimizer, self.engine, self._twins)
                cast(PreparedOptimizer, prepared).waits = False
        return _added(model, self._models)

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        if isinstance(optimizer, AcceleratedOptimizer):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        prepared = PreparedOptimizer(optimizer, self)
        if not prepared.waits:
            prepare_optimizer(optimizer, self.engine, self._twins)
        return _added(prepared, self._optimizers)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        order = self.use_seedable_sampler, self.dataloader_config.data_seed
        if self.engine.device.type != "xla" and (
            self.dispatch_batches or isinstance(data_loader.dataset, IterableDataset)
        ):
            stream = PreparedStream(data_loader, order, self.split_batches, self._next_batch)
            return _added(stream, self._dataloaders)
        part, count = self.engine.data_shard, self._opened.processes
        each = max(1, count // part.count)
        own = tuple(range(part.index * each, part.index * each + each))
        splits = self.split_batches or count == 1  # one device completes no batch, as there
        shards = Shards(own, count, splits, self.even_batches, *order)
        loader = PreparedLoader(
            data_loader, self.engine, shards, before_read=self._begin_work, end_step=self._next_batch
        )
        return _added(loader, self._dataloaders)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        cast(Any, prepared)._is_accelerate_prepared = True
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, PreparedLoader):
            return dataloader.skipping(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    # ---------------------------------------------------------------------------------------------------- the step

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None]:
        with super().accumulate(*models):
            yield
        self._end_step()

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Generator[None]:
        before, self._defers = self._defers, True
        try:
            yield
        finally:
            self._defers = before

    def backward(self, loss: Tensor, count: Tensor | float | None = None, **kwargs: Any) -> None:
        """Add the gradients of `loss`: the mean over this process's rows, or over its `count` items where a mask
        leaves some out. Uneven batches weigh by their rows. *collective* with `count`"""
        if not self._models:
            raise ConfigError("backward: no model is prepared.\n  Call accelerator.prepare(model, ...) before.")
        self._copies.end()
        share = self._share(count)
        if isinstance(share, Tensor) or share != 1.0:
            loss = loss * share
        if self.gradient_accumulation_steps > 1:
            loss = loss / self.gradient_accumulation_steps
        with ExitStack() as contexts:
            held = contexts.enter_context(self._graphs.backward())
            contexts.enter_context(self.engine.accumulate(not self._defers))
            for model in held:
                contexts.enter_context(self.engine.second_derivatives(model))
            loss.backward(**kwargs)

    def _share(self, count: Tensor | float | None = None) -> Tensor | float:
        """The factor that makes this process's mean a part of the global one, since gradients are sums."""
        if self.engine.device.type == "xla" or self.engine.process.count == 1:
            return 1.0
        if count is not None:
            own = torch.as_tensor(count, dtype=torch.float32, device=self.device)
            return own / self.engine.sum(own)
        rows = getattr(self.gradient_state.active_dataloader, "rows", None)
        return rows.own / rows.total if rows is not None else 1 / self.engine.data_shard.count

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_: norm_type={norm_type}: only the norm 2 is built.")
        return self.engine.clip_grad_norm(self._trained(parameters), float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        for weight in self._trained(parameters):
            if weight.grad is not None:
                own = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                own.clamp_(-clip_value, clip_value)

    def _trained(self, parameters: Any) -> list[Tensor]:
        return self._twins.of([parameters] if isinstance(parameters, Tensor) else parameters)

    def step_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The strict form: `function(batch)` holds the whole step, from forward to `zero_grad`, and returns tensors. On
        XLA it is one program; raises BackendError, with the line, for a step that reads a number on the host."""
        compiled = self.engine.compile(function, getattr(function, "__name__", "step"))

        def run(*args: Any) -> Any:
            self._end_step()
            self._is_whole = True
            try:
                return compiled(*args)
            finally:
                self._is_whole = False

        return run

    def _begin_work(self) -> None:
        """The engine works: the script's own operations are over."""
        self._reads.end()
        self._copies.end()

    def _end_step(self) -> None:
        self._reads.end()
        if not self._is_whole:
            self.engine.end_step()

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Generator[None]:
        with super().autocast(autocast_handler) if self._autocast else nullcontext():
            yield

    # ------------------------------------------------------------------------------------------- between processes

    def gather(self, tensor: Any) -> Any:
        self._saving.turns.point("gather")
        if self.engine.device.type != "xla":
            return super().gather(tensor)
        whole = recursively_apply(lambda value: self.engine.whole(value[None] if value.dim() == 0 else value), tensor)
        self._end_step()
        return whole

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        rows = getattr(self.gradient_state.active_dataloader, "rows", None)
        if self.engine.device.type != "xla" and rows and rows.own * self.engine.data_shard.count != rows.total:
            self._saving.turns.point("gather_for_metrics")
            if use_gather_object or not any(isinstance(value, Tensor) for value in tree_leaves(input_data)):
                return [each for part in self.engine.gather(input_data[: rows.own]) for each in part]
            own = recursively_apply(lambda value: torch.atleast_1d(value.detach().cpu())[: rows.own], input_data)
            return send_to_device(concatenate(self.engine.gather(own)), self.device)
        is_tensors = not use_gather_object and all(map(torch.is_tensor, tree_leaves(input_data)))
        if self.engine.device.type == "xla" and is_tensors:  # a slice that leaves nothing out would be a program, too
            state = self.gradient_state
            rest = state.remainder if state.end_of_dataloader and state.remainder > 0 else sys.maxsize
            return recursively_apply(
                lambda value: value[:rest] if len(value) > rest else value, self.gather(input_data)
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        self._saving.turns.point("reduce")
        if self.engine.device.type != "xla":
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(lambda value: value * scale if scale != 1.0 else value, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        self._saving.turns.point("pad_across_processes")
        if self.engine.device.type != "xla":
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)
        return tensor

    def wait_for_everyone(self) -> None:
        self._end_step()
        self._copies.begin()
        self._saving.turns.meet()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log numbers. Tensors are read at the next call, so that the device doesn't wait."""
        self._end_step()
        self._pending_log()
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        pending = self.engine.fetch(tensors) if tensors else None

        def send() -> None:
            read = {name: value.item() for name, value in pending.result().items()} if pending else {}
            super(Accelerator, self).log({**values, **read}, step=step, log_kwargs=log_kwargs)
            self._pending_log = lambda: None

        self._pending_log = send
        if pending is None:
            send()

    def end_training(self) -> None:
        self._end_step()
        self._saving.turns.point("end_training")
        self._pending_log()
        for tracker in self.trackers:
            tracker.finish()
        self._saving.turns.close()
        close()

    # ---------------------------------------------------------------------------------------------------- saving

    def _next_batch(self) -> None:
        """Before each batch of a prepared loader, and after the last: other processes join what process 0 does."""
        self._end_step()
        if self.gradient_state.active_dataloader is None:  # after the last batch
            self._copies.begin()
        self._saving.turns.point("its next batch")
        if self.engine.device.type == "xla":
            self._reads.begin_step()

    def save_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save all that was prepared or registered, in `output_dir`. All processes call it, or process 0 alone."""
        return self._saving.save(output_dir)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Load what `save_state` saved, on any engine and number of devices. *collective*"""
        self._saving.load(input_dir)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors on process 0's host, nothing on other processes. All call it, or process 0 alone."""
        return self._saving.state_dict(model) if self._saving.knows(model) else model.state_dict()

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        if self.engine.process.index == 0:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            self.get_state_dict(model)

    def register_for_checkpointing(self, *objects: Any) -> None:
        try:
            super().register_for_checkpointing(*objects)
        except ValueError as error:
            raise StateError(f"register_for_checkpointing: {error}") from None


def name_table() -> Mapping[str, Mapping[str, str]]:
    """Kind (own, inherited, refused) -> name of accelerate's class -> what it does here, or why it is refused."""
    return yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))


@cache
def _close_names() -> None:
    """Let names that aren't right here raise at their first use: those refused, and those of another version."""
    table = name_table()
    known = {name for kind in ("own", "inherited") for name in table[kind]}
    for name in {name for name in dir(accelerate.Accelerator) if not name.startswith("_")} - known:
        reason = table["refused"].get(
            name, f"accelerate {accelerate.__version__} has it, and this package doesn't know it"
        )
        error = ConfigError(f"Accelerator.{name} isn't built: {reason}.")

        def refuse(_: Any, error: ConfigError = error) -> Any:
            raise error

        setattr(Accelerator, name, property(refuse))


def _added(prepared: Any, among: list[Any]) -> Any:
    """Note a prepared object where accelerate's own code looks for it."""
    prepared._is_accelerate_prepared = True
    among.append(prepared)
    return prepared


def _makes_model(value: Any) -> bool:
    """Whether `prepare` takes it for a model: one, or a function or class that makes one."""
    if isinstance(value, nn.Module) or (isinstance(value, type) and issubclass(value, nn.Module)):
        return True
    kinds = (torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)
    return callable(value) and not isinstance(value, (*kinds, type)) and hasattr(value, "__code__")


def _by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(accelerate.Accelerator.__init__).bind(None, *args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"Accelerator: {error}.") from None
    return {name: value for name, value in bound.arguments.items() if name != "self"}


_OTHER_ENGINES = {
    "deepspeed_plugin": "DeepSpeed is another engine.\n  Leave it out.",
    "deepspeed_plugins": "DeepSpeed is another engine.\n  Leave it out.",
    "megatron_lm_plugin": "Megatron-LM is another engine.\n  Leave it out.",
    "torch_tp_plugin": "it isn't read.\n  Leave it out.",
    "parallelism_config": "it isn't read.\n  Leave it out: the devices split rows and weights.",
    "dynamo_plugin": "pass compile={'enabled': True} in place of it.",
    "dynamo_backend": "pass compile={'enabled': True} in place of it.",
}


def refuse_arguments(given: Mapping[str, Any], precision: str, processes: str) -> None:
    """Raise ConfigError for arguments and variables that choose another engine or that no engine here honours."""
    for name, reason in _OTHER_ENGINES.items():
        if given.get(name) not in (None, "no", "NO"):
            raise ConfigError(f"Accelerator: {name}: {reason}")
    for name, engine in {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}.items():
        if os.environ.get(name, "").lower() in ("1", "true"):
            raise ConfigError(f"Accelerator: {name}: {engine} is another engine.\n  Unset it.")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        reason = _OTHER_ENGINES["dynamo_backend"]
        raise ConfigError(f"Accelerator: ACCELERATE_DYNAMO_BACKEND, by `accelerate launch`: {reason}")
    if (chosen := os.environ.get("ACCELERATE_TORCH_DEVICE")) is not None:
        raise ConfigError(
            f"Accelerator: ACCELERATE_TORCH_DEVICE={chosen} isn't read.\n  Unset it, and set "
            f"PORTABLE_FSDP=device={chosen.partition(':')[0]}; CUDA_VISIBLE_DEVICES chooses among GPUs."
        )
    if precision not in ("no", "bf16"):
        raise ConfigError(f"Accelerator: mixed_precision={precision} isn't built.\n  Set bf16 or no.")
    if processes not in ("devices", "one"):
        raise ConfigError(f'Accelerator: processes={processes}: expected "devices" or "one".')
    if given.get("device_placement") is False:
        raise ConfigError("Accelerator: device_placement=False: models and batches always move.\n  Leave it out.")
    loaders = given.get("dataloader_config")
    if getattr(loaders, "use_stateful_dataloader", None):
        raise ConfigError("Accelerator: dataloader_config: use_stateful_dataloader isn't built.\n  Leave it out.")


def _in_autocast(forward: Callable[..., Any], device: str) -> Callable[..., Any]:
    from accelerate.utils import convert_outputs_to_fp32

    return convert_outputs_to_fp32(torch.autocast(device_type=device, dtype=torch.bfloat16)(forward))
