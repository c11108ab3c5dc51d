"""A script's loader as each process reads it: accelerate's order of rows, and how many of a batch are this process's.

`shards` groups of devices get different rows. On native each is a process; on XLA one process feeds several. By default
the batches `i * shards` to `i * shards + shards - 1` of the script's own sampler are one step, the last of them
completed by accelerate's rule (`BatchSamplerShard`); with `split_batches` each batch of the sampler is one.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import concatenate, find_batch_size, recursively_apply, slice_tensors
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from portable_fsdp.accelerator.position import Position
from portable_fsdp.backends.contract import Backend
from portable_fsdp.runtime.errors import ConfigError

_OF_BATCHES = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_LOADER = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
"""Arguments of a loader that its copy keeps: all that don't choose the rows of a batch."""


log = logging.getLogger("portable_fsdp")


class Sizes(NamedTuple):
    """The rows of a batch."""

    own: int  # read by this process
    total: int


class Shards(NamedTuple):
    """Which rows of a step this process reads."""

    own: tuple[int, ...]
    total: int
    split: bool  # each batch of the sampler, instead of `total` of them
    even: bool  # the last batches are completed
    seedable: bool = False  # a random order follows the epoch, from `seed` or torch's
    seed: int | None = None


class _Lazy:
    """The batches of a sampler, from an iterator that others share."""

    def __init__(self, sampler: Any, batches: Iterator[list[Any]]) -> None:
        self.batch_size, self.drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", False)
        self._batches = batches

    def __iter__(self) -> Iterator[list[Any]]:
        return map(list, self._batches)  # accelerate completes a batch in place


class OwnBatches(BatchSampler):
    """The rows of each step that this process reads, in the order of its shards."""

    def __init__(self, sampler: Iterable[list[Any]], shards: Shards, note: Callable[[Sizes], None]) -> None:
        self.batch_sampler, self.shards, self._note = sampler, shards, note
        self.batch_size, self.drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", False)
        self.skipped = 0  # steps

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        of_sampler = cast(Any, self.batch_sampler)
        if self.shards.split:
            return len(of_sampler) - self.skipped
        sampled = BatchSamplerShard(of_sampler, self.shards.total, 0, even_batches=self.shards.even)
        return len(sampled) - self.skipped

    def __iter__(self) -> Iterator[list[Any]]:
        steps = self._split() if self.shards.split else self._joined()
        for parts in itertools.islice(steps, self.skipped, None):
            own = [row for number in self.shards.own for row in parts[number]]
            sizes = Sizes(len(own), sum(map(len, parts)))
            self._note(sizes)
            # A process without rows computes one that doesn't count: the others wait for it in collectives.
            yield own or next(part for part in parts if part)[:1]

    def _split(self) -> Iterator[list[list[Any]]]:
        count = self.shards.total
        for batch in self.batch_sampler:
            size = -(-len(batch) // count)
            yield [batch[number * size : (number + 1) * size] for number in range(count)]

    def _joined(self) -> Iterator[list[list[Any]]]:
        count = self.shards.total
        copies = itertools.tee(iter(self.batch_sampler), count)
        samplers = [
            BatchSamplerShard(cast(Any, _Lazy(self.batch_sampler, copy)), count, number, even_batches=self.shards.even)
            for number, copy in enumerate(copies)
        ]
        for parts in itertools.zip_longest(*samplers, fillvalue=()):
            yield [list(part or ()) for part in parts]


class PreparedStream(DataLoaderDispatcher):
    """A stream on native, or any loader with dispatch_batches: process 0 reads the batches and deals out their rows."""

    def __init__(
        self, loader: DataLoader[Any], order: tuple[bool, int | None], split: bool, end_step: Callable[[], None]
    ) -> None:
        """`order`: `seedable` and `seed` of Shards."""
        self._end_step = end_step
        kept = {name: getattr(loader, name) for name in _LOADER if name != "generator" and hasattr(loader, name)}
        if isinstance(loader.dataset, IterableDataset):
            kept |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            kept["batch_sampler"] = batches = cast(BatchSampler, loader.batch_sampler)
            if order[0] and isinstance(getattr(batches, "sampler", None), RandomSampler):
                _make_seedable(batches, _seed(order[1]))
        super().__init__(loader.dataset, split_batches=split, _drop_last=bool(loader.drop_last), **kept)

    def __iter__(self) -> Generator[Any]:
        batches = super().__iter__()
        self._end_step()  # before each read, which is collective
        for batch in batches:
            yield batch
            self._end_step()


class PreparedLoader(DataLoaderShard):
    """A prepared loader: accelerate's own, whose batches end the step before them and are placed on the devices."""

    def __init__(
        self,
        loader: DataLoader[Any],
        engine: Backend,
        shards: Shards,
        before_read: Callable[[], None],
        end_step: Callable[[], None],
    ) -> None:
        """`loader`: the script's. `before_read` runs before rows are read, `end_step` before each batch and after the
        last one."""
        self._engine, self._shards, self._before_read, self._end_step = engine, shards, before_read, end_step
        self._sizes: deque[Sizes] = deque()
        self._has_warned, self._shapes = False, set[tuple[tuple[int, ...], ...]]()
        self.rows: Sizes | None = None  # of the running batch
        self._of_script = loader
        kept = {name: getattr(loader, name) for name in _LOADER if hasattr(loader, name)}
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        if self._is_stream:
            many = 1 if shards.split else len(shards.own)
            kept |= {"batch_size": loader.batch_size and loader.batch_size * many, "drop_last": loader.drop_last}
        else:
            batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
            if batches is None:
                raise ConfigError("prepare: a DataLoader with batch_size=None has no batches.\n  Set batch_size.")
            if shards.seedable and isinstance(getattr(batches, "sampler", None), RandomSampler):
                _make_seedable(
                    cast(BatchSampler, batches),
                    engine.agree(_seed(shards.seed)),
                )
            own = OwnBatches(cast(Any, batches), shards, self._sizes.append)
            kept["batch_sampler"] = own
            self._sampler = getattr(own.sampler, "sampler", own.sampler)
            if getattr(self._sampler, "generator", self) is None and not shards.split:  # of any class, as there
                seed = engine.agree(int(torch.empty((), dtype=torch.int64).random_().item()))
                self._sampler.generator = torch.Generator().manual_seed(seed)
        generator = getattr(self._sampler, "generator", None) if not self._is_stream else None
        self.position = Position(generator if isinstance(generator, torch.Generator) else None)
        self._origin: PreparedLoader | None = None  # of a copy that skips batches
        super().__init__(loader.dataset, _drop_last=bool(loader.drop_last), **kept)

    def skipping(self, steps: int) -> "PreparedLoader":
        """A copy that begins after the first `steps` batches."""
        copy = PreparedLoader(self._of_script, self._engine, self._shards, self._before_read, self._end_step)
        copy.iteration, copy.position, copy._origin = self.iteration, self.position, self._origin or self
        if self._is_stream:
            copy.skip_batches = steps
        else:
            cast(OwnBatches, copy.batch_sampler).skipped = steps
        return copy

    def __iter__(self) -> Generator[Any]:
        self._sizes.clear()
        self._end_step()
        self._before_read()
        state, first = self._sync_order(), None
        for batch in super().__iter__():
            self._end_step()
            self.rows = self._sizes.popleft() if self._sizes else None
            if self.rows and self._shards.split and self.rows.total != self.batch_sampler.batch_size:
                self.remainder = self.rows.total  # what is gathered for metrics has no more rows
            self._warn_of_parts()
            if state is not None:  # the sampler has drawn
                torch.set_rng_state(state)
                state = None
            if self._is_stream and self.end_of_dataloader and not self._shards.split:
                batch = self._completed(batch, first)
            elif first is None:
                first = batch
            self.position.note_batch()
            self._warn_of_shapes(batch)
            yield self.place(batch)
            self._before_read()
        self._end_step()
        self.rows = None
        self.position.finish()
        if self._origin is not None:
            self._origin.iteration = self.iteration

    def _warn_of_shapes(self, batch: Any) -> None:
        """XLA compiles a program for each: a full batch and the last one are two."""
        tensors = [value for value in tree_leaves(batch) if isinstance(value, Tensor)]
        self._shapes.add(tuple(tuple(tensor.shape) for tensor in tensors))
        if len(self._shapes) == 3 and self._engine.device.type == "xla":
            log.warning("a loader's batches have 3 shapes so far: XLA compiles a program for each. Pad to one length")
            self._shapes.add(())  # said once

    def _warn_of_parts(self) -> None:
        """XLA aborts the process for `weight[ids]` and one_hot without an error; `prepare_model` mends nn.Embedding."""
        if self.rows and self.rows.total % self._engine.row_shards and self._engine.device.type == "xla":
            text = "a batch of %d rows on %d devices: XLA ends models that look up one index a row without nn.Embedding"
            if not self._has_warned:
                log.warning(text, self.rows.total, self._engine.row_shards)
            self._has_warned = True

    def begin(self) -> None:
        super().begin()
        if self._shards.split and not self._is_stream:
            self.remainder = 0  # until a batch is smaller

    def _completed(self, batch: Any, first: Any) -> Any:
        """Complete the last rows of a stream as accelerate does: with the first ones, one for each shard."""
        self.remainder, missing = find_batch_size(batch), -find_batch_size(batch) % self._shards.total
        if not missing or not self._shards.even or self._drop_last:
            return batch
        return concatenate([batch, slice_tensors(batch if first is None else first, slice(0, missing))])

    def _sync_order(self) -> Tensor | None:
        """Let all processes draw the order of process 0, after a load that of the interrupted epoch. Return this
        process's own random state, if it was replaced."""
        skipped = self.skip_batches if self._is_stream else cast(OwnBatches, self.batch_sampler).skipped
        resumed = self.position.take_resumed()
        if self._is_stream:
            self.position.begin(None, skipped)
            return None
        generator = getattr(self._sampler, "generator", None)
        is_own = isinstance(generator, torch.Generator)
        before = generator.get_state() if is_own else torch.get_rng_state()
        state = self._engine.agree(before if resumed is None else resumed)
        if is_own:
            generator.set_state(state)
        else:
            torch.set_rng_state(state)
        self.position.begin(state, skipped)
        return None if is_own or (resumed is None and self._engine.process.index == 0) else before

    def place(self, batch: Any) -> Any:
        """Place tensors, nested in any way; other values stay."""
        if isinstance(batch, Mapping) and batch and all(isinstance(value, Tensor) for value in batch.values()):
            return cast(Any, type(batch))(self._engine.place(dict(batch)))  # by name: it knows what is text
        return recursively_apply(lambda value: self._engine.place({"value": value})["value"], batch)

    @property
    def total_batch_size(self) -> int:
        size = self.base_dataloader.batch_size if self._is_stream else self.batch_sampler.batch_size
        if size is None:
            raise ConfigError("total_batch_size: this loader's batches have no fixed size.")
        many = 1 if self._shards.split or self._is_stream else self._shards.total
        return size * many


def _seed(given: int | None) -> int:
    return torch.initial_seed() if given is None else given


def _make_seedable(batches: BatchSampler, seed: int) -> None:
    old = cast(Any, batches.sampler)
    batches.sampler = SeedableRandomSampler(
        old.data_source, old.replacement, old._num_samples, old.generator, data_seed=seed
    )
