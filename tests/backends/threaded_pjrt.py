"""Several PJRT CPU devices in one process, a thread each, for tests of the engine that drives one device a process.

As it is, torch_xla deadlocks there: threads that miss its cache at once compile one executable each, whose collectives
then wait for one another; and no lock may be held around the step marker, which can block until a collective has
ended. So each marker becomes a gate that holds nothing: thread k goes in once those before it have looked the
program up in the cache (or have left), and so finds the one that the first of them compiled.

What a process has once and these threads would share is given to each, or to one at a time: whether a backward
recomputes, and torch's random numbers.
"""

import importlib
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch


class _Gate:
    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self._left = [False] * count
        self._before = 0

    def sync(self, wait: bool = False, reset_scope: bool = True) -> None:
        """Replace torch_xla.sync; all threads call it."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        bridge: Any = cast(Any, torch_xla)._XLAC
        device = bridge._xla_get_default_device()
        rank = bridge._xla_get_default_device_ordinal()
        self.barrier.wait()
        if rank == 0:
            self._before = _lookups()
            self._left[:] = [False] * len(self._left)
        self.barrier.wait()
        while not all(self._left[:rank]) and _lookups() < self._before + rank:
            if self.barrier.broken:  # the device before this one failed
                raise threading.BrokenBarrierError
            time.sleep(0.001)
        bridge._xla_step_marker(device, [], wait=False, reset_scope=reset_scope)
        self._left[rank] = True
        self.barrier.wait()
        if wait:
            xm.wait_device_ops()
        xm._run_step_closures()
        bridge._set_all_reduce_token(device, None)


def _lookups() -> int:
    """Programs found in torch_xla's cache, plus those put into it."""
    import torch_xla.debug.metrics as metrics
    import torch_xla.runtime as runtime

    return (metrics.counter_value("CachedCompile") or 0) + runtime.get_num_cached_compilation_graph()


def _one_at_a_time(
    fork_rng: Callable[..., AbstractContextManager[None]],
) -> Callable[..., AbstractContextManager[None]]:
    """`torch.random.fork_rng` for threads: initial weights are drawn from the numbers of the process."""
    lock = threading.RLock()

    @contextmanager
    def fork(*args: Any, **kwargs: Any) -> Generator[None]:
        with lock, fork_rng(*args, **kwargs):
            yield

    return fork


class Devices:
    """The CPU devices of this process (CPU_NUM_DEVICES), each with a thread while a function runs on them."""

    def __init__(self) -> None:
        package, step_module, model, fsdp, checkpoint = (
            cast(Any, importlib.import_module(name))
            for name in (
                "torch_xla",
                "torch_xla.torch_xla",  # has torch_xla.compile, and a name of its own for sync
                "torch_xla.core.xla_model",
                "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel",
                "torch_xla.utils.checkpoint",
            )
        )
        self._bridge = package._XLAC
        self._devices: list[str] = model.get_xla_supported_devices()
        model.set_replication(self._devices[0], self._devices)
        self._gate = _Gate(len(self._devices))
        package.sync = step_module.sync = self._gate.sync

        class Status(threading.local):
            in_chkpt_bwd = False

        checkpoint.chkpt_status = fsdp.chkpt_status = Status()
        torch.random.fork_rng = _one_at_a_time(torch.random.fork_rng)

    def run(self, job: Callable[[], Any], devices: int) -> list[Any]:
        """Run `job` on each device and return the results; raises the error of the first device that failed."""
        assert devices == len(self._devices)
        answers: list[Any] = [None] * len(self._devices)
        failures: list[BaseException] = []

        def run_on(rank: int) -> None:
            self._bridge._xla_set_default_device(self._devices[rank])
            try:
                answers[rank] = job()
            except threading.BrokenBarrierError:
                pass  # another device failed
            except BaseException as error:
                failures.append(error)
                self._gate.barrier.abort()

        threads = [threading.Thread(target=run_on, args=(rank,)) for rank in range(len(self._devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._gate.barrier.reset()
        if failures:
            raise failures[0]
        return answers
