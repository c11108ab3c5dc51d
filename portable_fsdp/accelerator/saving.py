"""Checkpoints of a script: models, optimizers, schedulers, registered objects and the place of loaders, in our format.

`save_state` writes a checkpoint of the library into the folder that the script names, so that any engine and the
trainer can read it. Hooks get whole models on the host, as on one device. A model's own `state_dict` gives whole
tensors, and its `load_state_dict` takes them: `save_pretrained`, peft and others then work unchanged.
"""

# What an Accelerator holds is in attributes with an underscore, which accelerate's own code reads too.
# pyright: reportPrivateUsage=false

import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys

from portable_fsdp.accelerator.random_states import RandomStates
from portable_fsdp.accelerator.rows import PreparedLoader
from portable_fsdp.accelerator.state import log
from portable_fsdp.accelerator.turns import turns_of
from portable_fsdp.accelerator.whole import copy_of, in_own_classes, layouts, put_whole, whole
from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.state import parameter_slots
from portable_fsdp.checkpoint import manifests
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from portable_fsdp.accelerator.front import Accelerator


class StateError(CheckpointError, ValueError):
    """accelerate raises ValueError here, which scripts may handle."""


class Saving:
    """What an Accelerator saves and loads."""

    def __init__(self, accelerator: "Accelerator", engine: Backend, config: Config) -> None:
        self._accelerator, self._engine, self._config = accelerator, engine, config
        self._models: list[nn.Module] = []  # all that were prepared: their numbers name them to other processes
        self._all_optimizers: list[Any] = []
        self._before_put: dict[tuple[int, str], Tensor] = {}  # weight -> this process's part before a put
        self.turns = turns_of(engine, config.run.peer_timeout_s)
        self.random = RandomStates(engine)
        self._value = torch.empty(0)  # that process 0 puts into a weight
        actions = {"state_dict": self._state_dict, "put": self._put, "put_back": self._put_back, "pickle": self._copy}
        actions |= {"optimizer_state": self._optimizer_state}
        actions |= {"save_state": self._save, "load_state": self._load}
        self._number = self.turns.register(actions)

    # ------------------------------------------------------------------------------------------------------ models

    def adopt(self, model: nn.Module) -> None:
        """Let a prepared model's `state_dict` and `load_state_dict` speak of whole tensors, and those of its modules.

        torch's recursion and the engine, which passes keep_vars, still get the shards.
        """
        number = len(self._models)
        self._models.append(model)
        if isinstance(model, FSDPModule):  # a class that FSDP made: diffusers writes its name into configs
            type(model).__name__ = type(model).__name__.removeprefix("FSDP")
        self.turns.watch(model)
        cast(Any, model).__reduce_ex__ = partial(self._pickle, number)
        for path, module in model.named_modules():
            plain = module.state_dict
            own = cast(Any, module)
            own.load_state_dict = partial(self._load_state_dict, model, module, plain)
            own.state_dict = partial(self._state_dict_of, number, path, plain)

    def _state_dict_of(self, number: int, path: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("destination") is not None or kwargs.get("keep_vars"):
            return plain(*args, **kwargs)
        return self.turns.act(self._number, "state_dict", number, path, kwargs.get("prefix", ""), False)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole tensors of a prepared model on process 0, empty on others. *collective*"""
        return self.turns.act(self._number, "state_dict", self._models.index(model), "", "", True)

    def _pickle(self, number: int, protocol: int) -> Any:
        """What is pickled, or copied, of a prepared model: a whole one. Processes that read it need no Accelerator."""
        return _same, (self.turns.act(self._number, "pickle", number),)

    def _copy(self, is_own: bool, number: int) -> nn.Module:
        model = self._models[number]
        values = whole(self._engine, model, [*model.parameters(), *model.buffers()], True)
        copy = in_own_classes(copy_of(model, values, {}))
        return copy if self._engine.device.type == "xla" else copy.to(self._engine.device)

    def knows(self, model: object) -> bool:
        return any(model is each for each in self._models)

    def _state_dict(self, is_own: bool, number: int, path: str, prefix: str, only_main: bool) -> dict[str, Any]:
        model = self._models[number]
        state = model.get_submodule(path).state_dict(prefix=prefix, keep_vars=True)
        keep = is_own and (not only_main or self._engine.process.index == 0)
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        copies = whole(self._engine, model, tensors, keep)
        if not keep:
            return {}
        for name, value in state.items():  # the dict stays: it has torch's metadata
            if isinstance(value, Tensor):
                state[name] = copies[value]
        return state

    def put(self, weight: DTensor, value: Tensor) -> bool:
        """Overwrite a weight by process 0's whole value, or by what it was before such a put. All processes call it, or
        process 0 alone. False for parts of another origin, which each process puts in by itself."""
        at = self._name_of(weight) or (0, "")  # process 0 has the first rows of each weight
        if isinstance(value, DTensor):
            before = self._before_put.get(at)
            if before is None or not torch.equal(before, value.to_local().cpu()):
                return False
            self.turns.act(self._number, "put_back", *at, by_name=True)
            return True
        self._value = value
        self.turns.act(self._number, "put", *at, by_name=True)
        return True

    def _name_of(self, weight: DTensor) -> tuple[int, str] | None:
        """The number of a weight's model, and its name there; `weight` may be its `.data`."""
        part = weight.to_local().data_ptr()
        own = ((at, name, w) for at, model in enumerate(self._models) for name, w in model.named_parameters())
        found = ((at, name) for at, name, w in own if isinstance(w, DTensor) and w.to_local().data_ptr() == part)
        return next(found, None)

    def _put(self, is_own: bool, number: int, name: str) -> None:
        weight = cast(DTensor, self._models[number].get_parameter(name))
        self._before_put[number, name] = weight.to_local().detach().to("cpu", copy=True)
        value = self._value.detach() if self._engine.process.index == 0 else torch.empty(weight.shape)
        value = value.to(weight.device, weight.dtype)
        with torch.no_grad():
            weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))

    def _put_back(self, is_own: bool, number: int, name: str) -> None:
        """Undo a put: an average's `restore`, perhaps on process 0 alone."""
        with torch.no_grad():
            part = cast(DTensor, self._models[number].get_parameter(name)).to_local()
            part.copy_(self._before_put.pop((number, name)))

    def forget_puts(self) -> None:
        """The optimizer steps: what was put in stays."""
        self._before_put.clear()

    def adopt_optimizer(self, prepared: Any) -> int:
        self._all_optimizers.append(prepared)
        return len(self._all_optimizers) - 1

    def optimizer_state(self, number: int) -> dict[str, Any]:
        """An optimizer's state with whole tensors. All processes call it, or process 0 alone."""
        return self.turns.act(self._number, "optimizer_state", number)

    def _optimizer_state(self, is_own: bool, number: int) -> dict[str, Any]:
        state = self._all_optimizers[number].optimizer.state_dict()
        values = [value for each in state["state"].values() for value in each.values()]
        copies = whole(self._engine, nn.Module(), filter(torch.is_tensor, values), is_own)
        if not is_own:
            return {}
        parts = {
            at: {key: copies[v] if isinstance(v, Tensor) else v for key, v in values.items()}
            for at, values in state["state"].items()
        }
        return {**state, "state": parts}

    def _load_state_dict(
        self, model: nn.Module, module: nn.Module, plain: Any, state_dict: Mapping[str, Any], strict: bool = True,
        assign: bool = False,
    ) -> Any:  # fmt: skip
        """torch's, with whole tensors that each process has."""
        own: dict[str, Any] = plain(keep_vars=True)
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        shared = [(own[name], state_dict[name], name) for name in own if name in state_dict]
        shapes = {tensor: shape for tensor, (_, shape) in layouts(self._engine, model).items()}
        problems = [
            f"size mismatch for {name}: {[*new.shape]}, and {[*shapes[old]]} in the model."
            for old, new, name in shared
            if isinstance(old, Tensor) and old in shapes and shapes[old] != (*new.shape,)
        ]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if strict and names:
                problems.append(f"{what} key(s) in state_dict: {', '.join(names)}.")
        if problems:
            text = "\n\t".join(problems)
            raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{text}")
        put_whole(self._engine, model, {old: new for old, new, _ in shared if isinstance(old, Tensor)})
        for old, new, name in shared:
            if not isinstance(old, Tensor):
                module.get_submodule(name.rpartition(".")[0]).set_extra_state(new)
        return _IncompatibleKeys(missing, unexpected)

    # ------------------------------------------------------------------------------------------------ save and load

    def save(self, output_dir: str | os.PathLike[str] | None) -> str:
        """`save_state`. Returns the folder. *collective*, or by process 0 alone"""
        folder = None if output_dir is None else os.fspath(output_dir)
        return self.turns.act(self._number, "save_state", folder, by_name=True)

    def load(self, input_dir: str | os.PathLike[str] | None, *, weights_only: bool = False) -> None:
        folder = None if input_dir is None else os.fspath(input_dir)
        self.turns.act(self._number, "load_state", folder, weights_only, by_name=True)

    def _save(self, is_own: bool, output_dir: str | None) -> str:
        accelerator, engine = self._accelerator, self._engine
        engine.end_step()
        if not accelerator.sync_gradients:
            log.warning("save_state within a gradient accumulation: a resume lacks the gradients added so far")
        folder = on_process_0(engine, lambda: new_folder(accelerator, output_dir))
        elsewhere = self._run_save_hooks(folder)
        steps = max((optimizer.steps for optimizer in self._optimizers().values()), default=0)
        objects = self._objects()
        replaces = on_process_0(engine, lambda: _are_of_scripts(Path(folder)))
        with self._open(folder, elsewhere, keep=1 if replaces else None) as checkpoints:
            step = on_process_0(engine, lambda: _free_step(Path(folder), steps))
            checkpoints.save(step, self._named_models(), self._inner_optimizers(), (0, 0), objects=objects)
            checkpoints.wait()
        accelerator.project_configuration.iteration += 1
        return folder

    def _load(self, is_own: bool, input_dir: str | None, weights_only: bool) -> None:
        accelerator = self._accelerator
        self._engine.end_step()
        folder = on_process_0(self._engine, lambda: existing_folder(accelerator, input_dir))
        models = [*accelerator._models]
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, folder)
        elsewhere = [name for name, model in self._named_models().items() if not any(model is m for m in models)]
        objects = self._objects()
        with self._open(folder, elsewhere) as checkpoints:
            if (point := checkpoints.find("auto")) is None:
                raise StateError(f"load_state: {folder} has no checkpoint.\n  Pass a folder of save_state.")
            on_process_0(self._engine, lambda: require_weights(point.path, [*self._named_models()], elsewhere))
            source = point._replace(weights_only=weights_only)
            checkpoints.load(source, self._named_models(), self._inner_optimizers(), objects)
        if not weights_only:
            self.random.set()

    def _open(self, folder: str, elsewhere: Collection[str], keep: int | None = None) -> Checkpoints:
        config = self._config.model_dump(mode="json")
        for key in ("micro_batch", "global_batch"):  # of the engine's devices: the script has its own batches
            config["train"].pop(key, None)
        update = {"async_save": False, "keep": keep, "keep_every": None}
        settings = self._config.checkpoint.model_copy(update=update)
        models = [*self._named_models().values()]
        is_one = len(models) == 1 and not elsewhere  # then transformers can open it, and the trainer
        architecture: Any = getattr(models[0], "config", None) if is_one else None
        checkpoints = Checkpoints(
            folder,
            self._engine,
            config=config,
            settings=settings,
            model_config=architecture.to_dict() if hasattr(architecture, "model_type") else None,
            ties=_ties(models[0]) if is_one else None,
        )
        checkpoints.saved_elsewhere = elsewhere
        return checkpoints

    def _named_models(self) -> dict[str, nn.Module]:
        return _numbered("model", self._accelerator._models)

    def _optimizers(self) -> dict[str, Any]:
        return _numbered("optimizer", self._accelerator._optimizers)

    def _inner_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: optimizer.optimizer for name, optimizer in self._optimizers().items()}

    def _objects(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "accelerator": _Counters(accelerator, self._optimizers()),
            "random": self.random,
            **_numbered("scheduler", accelerator._schedulers),
            **_numbered("loader", [_LoaderState(loader, self._engine) for loader in accelerator._dataloaders]),
            **_numbered("object", accelerator._custom_objects),
        }

    def _run_save_hooks(self, folder: str) -> list[str]:
        """Run the hooks with whole models, on process 0. Returns the models whose weights they have saved."""
        hooks = [*self._accelerator._save_model_state_pre_hook.values()]
        if not hooks:
            return []
        is_main, named = self._engine.process.index == 0, self._named_models()
        copies: list[nn.Module] = []
        for model in named.values():
            values = whole(self._engine, model, [*model.parameters(), *model.buffers()], is_main)
            copies += [copy_of(model, values, {})] if is_main else []

        def run() -> list[str]:
            weights = [copy.state_dict() for copy in copies]
            all_weights, models = [*weights], [*copies]
            try:
                with self.turns.quiet():
                    for hook in hooks:
                        hook(models, weights, folder)
            finally:
                self.turns.point("the end of the save hooks")
            return [name for name, w in zip(named, all_weights, strict=True) if not any(w is each for each in weights)]

        if not is_main:  # a hook may call what needs all processes, as a prepared model's state_dict
            self.turns.point("the end of the save hooks")
        return on_process_0(self._engine, run)


def _same(value: Any) -> Any:
    return value


def _numbered(name: str, values: Iterable[Any]) -> dict[str, Any]:
    """Name values; a single one has no number, so that a script and the trainer name one model alike."""
    listed = [*values]
    return {name if len(listed) == 1 else f"{name}_{number}": value for number, value in enumerate(listed)}


def _ties(model: nn.Module) -> dict[str, str]:
    names = dict(model.named_parameters(remove_duplicate=False))
    slots = parameter_slots(model)
    first = {names[fqn]: fqn for fqn in slots}
    return {fqn: first[weight] for fqn, weight in names.items() if fqn not in slots}


class _Counters:
    """An Accelerator's own numbers."""

    def __init__(self, accelerator: "Accelerator", optimizers: Mapping[str, Any]) -> None:
        self._accelerator, self._optimizers = accelerator, optimizers

    def state_dict(self) -> dict[str, Any]:
        steps = {name: optimizer.steps for name, optimizer in self._optimizers.items()}
        return {"step": self._accelerator.step, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for name, optimizer in self._optimizers.items():
            optimizer.steps = state["steps"][name]


class _LoaderState:
    """A loader's position as an object of a checkpoint, the same on all processes."""

    def __init__(self, loader: Any, engine: Backend) -> None:
        self._loader, self._engine = loader, engine

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        if type(loader) is not PreparedLoader:
            return {"epoch": getattr(loader, "iteration", 0)}
        try:
            batches = len(loader)
        except TypeError:  # a stream
            batches = None
        return self._engine.agree(loader.position.state(loader.iteration, batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.iteration = state["epoch"]
        if type(self._loader) is PreparedLoader and "order" in state:
            self._loader.position.load(state)


# ------------------------------------------------------------------------------------------ folders, by process 0


def new_folder(accelerator: "Accelerator", output_dir: str | None) -> str:
    """The folder of a save, as accelerate names it; the oldest ones are deleted before. Raises StateError."""
    settings = accelerator.project_configuration
    if not settings.automatic_checkpoint_naming:
        if output_dir is None:
            raise StateError("save_state: no folder.\n  Pass output_dir, or set automatic_checkpoint_naming.")
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        return output_dir
    parent = Path(str(accelerator.project_dir), "checkpoints")
    parent.mkdir(parents=True, exist_ok=True)
    folder, earlier = parent / f"checkpoint_{settings.iteration}", _by_number(parent)
    if (limit := cast(int | None, settings.total_limit)) is not None:
        for old in earlier[: max(0, len(earlier) + 1 - limit)]:
            shutil.rmtree(old)
    if folder.exists():
        raise StateError(f"save_state: {folder} exists.\n  Set project_configuration.iteration to a new number.")
    folder.mkdir()
    return str(folder)


def existing_folder(accelerator: "Accelerator", input_dir: str | None) -> str:
    """The folder to load. Raises StateError."""
    if input_dir is not None:
        folder = Path(input_dir).expanduser()
        if not folder.is_dir():
            raise StateError(f"load_state: {folder} is no folder.\n  Pass the folder that save_state wrote.")
        return str(folder)
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise StateError("load_state: no folder.\n  Pass input_dir, or set automatic_checkpoint_naming.")
    parent = Path(str(accelerator.project_dir), "checkpoints")
    if not parent.is_dir() or not (folders := _by_number(parent)):
        raise StateError(f"load_state: {parent} has no checkpoint.\n  Pass the folder that save_state wrote.")
    return str(folders[-1])


def _by_number(parent: Path) -> list[Path]:
    return sorted(
        (path for path in parent.iterdir() if re.search(r"\d+$", path.name)),
        key=lambda path: int(re.findall(r"\d+", path.name)[-1]),
    )


def _are_of_scripts(folder: Path) -> bool:
    """Whether all checkpoints in a folder are of `save_state`, which then replaces them; a run's own stay."""
    try:
        names = [manifests.read_manifest(path).named for path in manifests.committed_steps(folder)]
    except CheckpointError:  # a damaged one
        return False
    return all(named is not None and "accelerator" in named.objects for named in names)


def _free_step(folder: Path, steps: int) -> int:
    """The number of a checkpoint: of the optimizer's steps, if the folder has no such or later one."""
    return max([steps, *((manifests.step_of(path) or 0) + 1 for path in manifests.committed_steps(folder))])


def require_weights(checkpoint: Path, models: Collection[str], elsewhere: Collection[str]) -> None:
    """Raise StateError for a model whose weights a save hook has kept, and that no load hook took."""
    manifest = manifests.read_manifest(checkpoint)
    weights = [key for key in manifest.tensors if manifests.folder_of(key) == "model"]
    for name in models:
        prefix = f"{name}." if len(models) > 1 else ""
        if name not in elsewhere and not any(key.startswith(prefix) for key in weights):
            raise StateError(
                f"load_state: {checkpoint} lacks the weights of {name}: a save hook took them out of its list.\n"
                "  Register a load hook that loads them, and takes the model out of its list."
            )
