"""The methods of transformers' Trainer that differ on our engines: the Accelerator, losses, and checkpoints.

A batch of the loader is that of all devices, as one process would read it: `per_device_train_batch_size` rows for each.
So steps, orders and losses are those of Trainer on one device with the global batch. Trainer sums losses that are
divided by `num_items_in_batch` over processes; means are weighed by the rows of each.
"""

# What an Accelerator holds is in attributes with an underscore, which Trainer's code reads too.
# pyright: reportPrivateUsage=false

import copy
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from accelerate.utils import find_batch_size
from torch import Tensor, nn

from portable_fsdp.accelerator.front import Accelerator
from portable_fsdp.accelerator.rows import PreparedLoader, Sizes
from portable_fsdp.checkpoint import manifests
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.trainers.arguments import accelerator_of, keep_transformers_off_xla, storable
from portable_fsdp.trainers.of_trl import gather_head, is_of_trl

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

STATE_FOLDER = "portable_fsdp"
"""The folder of our checkpoint in one of Trainer's; beside it are the weights for `from_pretrained`."""


def subclass_of(trainer: Any, options: Mapping[str, Any]) -> Any:
    """`on_portable`."""
    keep_transformers_off_xla()
    import transformers
    from transformers import trainer as module

    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise ConfigError(f"on_portable: expected transformers' Trainer or a subclass of it, found {trainer!r}.")
    names = cast(dict[str, Any], vars(module))
    if (skip := names["skip_first_batches"]) is not _skip_first_batches:
        _skips.append(skip)
        names["skip_first_batches"] = _skip_first_batches
    return type(trainer.__name__, (PortableTrainer, trainer), {"_options": dict(options), "__doc__": trainer.__doc__})


class PortableTrainer(Base):
    """What `on_portable` puts before a Trainer class."""

    _options: ClassVar[Mapping[str, Any]] = {}
    accelerator: Accelerator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from transformers import TrainingArguments

        def own(value: Any) -> Any:  # so that our changes stay with this Trainer
            return copy.copy(value) if isinstance(value, TrainingArguments) else value

        super().__init__(*map(own, args), **{name: own(value) for name, value in kwargs.items()})

    def create_accelerator_and_postprocess(self) -> None:
        self.accelerator = accelerator_of(self.args, self.model, self._options)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False  # Trainer's own code for them
        self._window: deque[Sizes | None] = deque()  # the rows of each batch that Trainer has fetched
        self._evaluated: list[tuple[Tensor, int]] = []  # the loss of each batch, and its rows
        self._items: Any = None  # the number of items of the batch that is evaluated now
        self._sums = False  # its loss was a sum, divided by the number of items of the whole step
        self.accelerator.register_for_checkpointing(_TrainersSchedule(self))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model on the host: each device gets its shards from there."""

    # ----------------------------------------------------------------------------------------------------- the rows

    @property
    def _devices_of_batch(self) -> int:
        """How many devices share a batch; 1 where the script's own `split_batches` says that it is the global one."""
        return 1 if cast(Any, self.args.accelerator_config).split_batches else self.accelerator.engine.row_shards

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self._devices_of_batch

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(dataset, description, batch_size * self._devices_of_batch, *args, **kwargs)
        self.accelerator._dataloaders.clear()  # Trainer knows its position itself
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        self._window.clear()
        rows = _noted(epoch_iterator, lambda batch: self._window.append(self._rows(batch)))
        batches = super().get_batch_samples(rows, *args, **kwargs)
        self.accelerator.engine.end_step()  # counting the items is a program by itself
        return batches

    def _rows(self, batch: Any) -> Sizes | None:
        """The rows of a batch that was fetched now. Those that don't count are taken out of its labels."""
        sizes = getattr(self.accelerator.gradient_state.active_dataloader, "rows", None)
        if sizes is not None and sizes.own == 0:
            for name in ("labels", "shift_labels"):
                if isinstance(batch, Mapping) and isinstance(batch.get(name), Tensor):
                    cast(Any, batch)[name] = torch.full_like(batch[name], -100)
        return sizes

    # ---------------------------------------------------------------------------------------------------- the step

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        keep = self.args.gradient_accumulation_steps > 1
        engine, optimizer = self.accelerator.engine, cast(Any, self.optimizer).optimizer
        model.zero_grad = lambda set_to_none=True: engine.zero_gradients(optimizer, keep=keep)  # Trainer calls it
        if is_of_trl(type(self)):
            gather_head(model)
        return model, loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        rows, self._sums = self._window.popleft() if self._window else None, False
        self._weigh_by(rows)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            self.accelerator.engine.end_step()
        weight = self._weight(rows, self._sums)
        return loss if weight == 1.0 else loss * weight

    def _weigh_by(self, rows: Sizes | None) -> None:
        """Let `backward` weigh by these rows; Trainer may have fetched other batches since. None: the loss is a sum."""
        loader: Any = self.accelerator.gradient_state.active_dataloader
        if hasattr(loader, "rows"):
            loader.rows = rows

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._items is not None:
            kwargs["num_items_in_batch"] = self._items  # trl's evaluation leaves it out
        many, number = self.accelerator.num_processes, kwargs.get("num_items_in_batch")
        if many == 1 or not self._multiplies(number):
            return super().compute_loss(model, inputs, *args, **kwargs)
        kwargs["num_items_in_batch"] = items = TrackedCount.of(number)
        result: Any = super().compute_loss(model, inputs, *args, **kwargs)
        self._sums = items.was_read()
        if self._sums:
            if self._items is None:  # a training step
                self._weigh_by(None)
            return result
        # The model ignores the number and returns a mean, which Trainer has multiplied by the processes.
        return (result[0] / many, *result[1:]) if isinstance(result, tuple) else result / many

    def _multiplies(self, num_items_in_batch: Any) -> bool:
        """Whether Trainer multiplies the loss by the number of processes, as a part of the global one."""
        divides = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self.loss_is_scaled_for_ga is False:  # a subclass whose own loss is a mean over rows
            return False
        return bool(self.args.average_tokens_across_devices and divides and num_items_in_batch is not None)

    def _weight(self, rows: Sizes | None, is_sum: bool) -> float:
        """The factor for a loss whose mean over processes is then the loss of the global batch."""
        return 1.0 if is_sum or rows is None else rows.own * self.accelerator.num_processes / rows.total

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the engine's norm is over all weights

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.accelerator.engine.end_step()  # Trainer reads the loss
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # -------------------------------------------------------------------------------------------------- evaluation

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows(inputs)
        number = self._get_num_items_in_batch([inputs], self.args.device) if self.label_names else None
        self._items, self._sums = number, False
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        self._items = None
        if loss is not None:
            weight = self._weight(rows, self._sums) / self.accelerator.num_processes
            loss = self.accelerator.reduce(loss * weight, "sum")
            self._evaluated.append((loss, rows.total if rows else find_batch_size(inputs) or 1))
        return (loss, *others)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; the loss is weighed by the rows of each batch, of which Trainer knows those of one device."""
        self._evaluated = []
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        name = f"{kwargs.get('metric_key_prefix', args[3] if len(args) > 3 else 'eval')}_loss"
        if self._evaluated and name in (output.metrics or {}):
            losses = torch.stack([loss for loss, _ in self._evaluated]).double().cpu()
            rows = torch.tensor([float(count) for _, count in self._evaluated], dtype=torch.float64)
            if self.args.logging_nan_inf_filter and (finite := losses.isfinite()).any():
                losses, rows = losses[finite], rows[finite]
            cast(dict[str, float], output.metrics)[name] = float((losses * rows).sum() / rows.sum())
        return output

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights for `from_pretrained`, or peft's adapters. *collective*"""
        folder = output_dir if output_dir is not None else self.args.output_dir
        is_prepared = any(self.model is each for each in self.accelerator._models)
        state = self.accelerator.get_state_dict(self.model) if is_prepared else None
        if (args := self.args).should_save:
            self.args = storable(args)
            try:
                self._save(folder, state_dict=state)
            finally:
                self.args = args
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_state(os.path.join(output_dir, STATE_FOLDER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.accelerator.load_state(os.path.join(checkpoint, STATE_FOLDER))

    def _save_rng_state(self, output_dir: str) -> None:
        """They are in our checkpoint."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.accelerator._saving.random.set()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check the folder: its weights come with the optimizer's state, once the model is sharded."""
        folder = Path(resume_from_checkpoint)
        if not folder.is_dir():
            raise CheckpointError(f"resume_from_checkpoint: Can't find a valid checkpoint at {folder}.")
        if not manifests.committed_steps(folder / STATE_FOLDER):
            raise CheckpointError(
                f"resume_from_checkpoint: {folder} has no whole checkpoint in {STATE_FOLDER}/: plain Trainer saved it, "
                f'or save_only_model.\n  For its weights alone load the model from it: from_pretrained("{folder}").'
            )

    def _load_best_model(self) -> None:
        """Load the weights of the best evaluation. *collective*"""
        folder = os.path.join(str(self.state.best_model_checkpoint), STATE_FOLDER)
        self.accelerator._saving.load(folder, weights_only=True)


_READS = {
    *("div", "div_", "true_divide", "__truediv__", "__rtruediv__", "__itruediv__", "mul", "__mul__", "__rmul__"),
    *("reciprocal", "item", "tolist", "__int__", "__float__", "__index__"),
}


class TrackedCount(Tensor):
    """A 0-dim number that notes whether a loss computes with it, also after a cast or a copy to a device."""

    _flag: list[bool]

    @staticmethod
    def of(value: Any, flag: list[bool] | None = None) -> "TrackedCount":
        noted = torch.as_tensor(value).as_subclass(TrackedCount)
        noted._flag = [False] if flag is None else flag
        return noted

    def was_read(self) -> bool:
        return self._flag[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flags = [value._flag for value in args if isinstance(value, TrackedCount) and hasattr(value, "_flag")]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        for flag in flags:
            flag[0] |= getattr(func, "__name__", "") in _READS
        if not flags or flags[0][0] or not isinstance(result, Tensor) or result.dim():
            return result
        return TrackedCount.of(result, flags[0])  # a cast, or a copy


class _TrainersSchedule:
    """Trainer's schedule as an object of a checkpoint: it may be made after a load is prepared."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self._trainer.lr_scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.lr_scheduler.load_state_dict(state)


# --------------------------------------------------------------------------------------------------- skipped batches

_skips: list[Callable[..., Any]] = []  # accelerate's function, which Trainer imports


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """accelerate's, which a prepared loader does itself."""
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    return _skips[0](dataloader, num_batches)


def _noted(batches: Iterator[Any], note: Callable[[Any], None]) -> Iterator[Any]:
    for batch in batches:
        note(batch)
        yield batch
