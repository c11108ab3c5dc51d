"""What the two engines of torch_xla share: the environment, an operation, names of devices, counted programs,
recomputation.

torch_xla is imported in functions only, since it reads the environment that `set_environment` sets when it is imported.
"""

import logging
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.backends.base import Metrics
from portable_fsdp.backends.pjrt_options import libtpu_arguments
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError

log = logging.getLogger("portable_fsdp")

_LOWERING = Lock()  # devices may be threads

Forward = Callable[..., Any]


def set_environment(device: str) -> None:
    """What torch_xla reads when it is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else each compilation prints that GSPMD is to be deprecated
    logging.getLogger("absl").setLevel(logging.ERROR)  # else jax's packages warn that TensorFlow is absent
    os.environ["PJRT_DEVICE"] = "TPU" if device == "tpu" else "CPU"
    if device == "tpu":
        os.environ["LIBTPU_INIT_ARGS"] = libtpu_arguments(os.environ)
    if device == "cpu":  # else jax looks for a TPU where libtpu is installed, and complains
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def lower_triangular_solves() -> None:
    """Let XLA solve triangular systems in this process: the linear attention of Qwen3-Next and its kin does.

    torch_xla 2.9.0 lowers torch.triangular_solve, and not torch.linalg.solve_triangular, which took its place: that
    would run on the host in each step. Call after torch_xla's import, from any thread, as often as you like.
    """
    with _LOWERING:
        _lowered()


@cache  # which keeps the library: what it says ends with it
def _lowered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("linalg_solve_triangular", _solve_triangular, "XLA")
    return library


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """X of `a` X = `b`, or of X `a` = `b` if not `left`; `a` `[..., n, n]` is lower triangular if not `upper`."""
    if not left:
        return _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    return torch.triangular_solve(b, a, upper=upper, unitriangular=unitriangular).solution


def tpu_name() -> str:
    """The chip's name as PJRT writes it (TPU v5p, TPU v5 lite); an unknown one keeps MFU unknown."""
    from torch_xla._internal import tpu

    kind = str(cast(Any, tpu).get_tpu_env()["ACCELERATOR_TYPE"]).split("-")[0]  # v5litepod, v5p, v6e
    return f"TPU {kind.replace('litepod', ' lite')}"


def expected_programs(config: Config, accumulation: int) -> int:
    """The step, or a micro batch and the update; and the evaluation, where the run has one."""
    return (1 if accumulation == 1 else 2) + (config.train.eval_every is not None)


class Programs:
    """Functions that XLA compiles as they are called: counts compilations, and warns of unexpected ones."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.compilations = 0

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        import torch_xla

        seen = 0

        def step(*args: Any) -> Metrics:
            nonlocal seen
            before, fallen = _compile_count(), _fallen_back()
            try:
                with cast(Any, torch_xla).compile(name=name, full_graph=True):
                    out = fn(*args)
            except RuntimeError as error:
                if "Unexpected execution" not in str(error):
                    raise
                raise _not_one_program(self._engine, name, error, sorted(_fallen_back() - fallen)) from error
            new = _compile_count() - before
            self.compilations += new
            seen += new
            if new and seen > 1:
                log.warning(
                    "backend %s: program %r was compiled %d times, expected once. Shapes of its inputs now: %s. A "
                    "shape or a Python number that changes with the step does that; XLA_SAVE_TENSORS_FILE=FILE shows "
                    "the programs.",
                    self._engine,
                    name,
                    seen,
                    [_shapes(argument) for argument in args],
                )
            return out

        return step


def _compile_count() -> int:
    import torch_xla.debug.metrics as counters

    data = cast(Any, counters).metric_data("CompileTime")
    return int(data[0]) if data else 0


def _fallen_back() -> set[str]:
    """Operations that torch_xla has run on the host so far in this process, which it counts under their own names."""
    import torch_xla.debug.metrics as counters

    names: list[str] = cast(Any, counters).counter_names()
    return {name for name in names if name.startswith("aten::")}


def _not_one_program(engine: str, name: str, error: RuntimeError, fallen: list[str]) -> BackendError:
    """`error`: torch_xla's, of a function that must run what it has traced before it can be traced to its end."""
    inside = Path(torch.__file__).parent.parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_torchs(frame.filename)]
    where = f"{frames[-1].filename.removeprefix(f'{inside}/')}:{frames[-1].lineno}: {frames[-1].line}"
    what = f"{', '.join(fallen)} run on the host" if fallen else "a value read on the host"
    return BackendError(
        f"backend {engine}: program {name!r}: expected operations that XLA compiles, found {what} in\n  {where}\n"
        "  In each step all devices would wait for it. Train this model with --backend=native. Nothing was trained."
    )


def _is_torchs(file: str) -> bool:
    return any(f"/site-packages/{package}/" in file for package in ("torch", "torch_xla"))


def _shapes(argument: Any) -> Any:
    if isinstance(argument, dict):
        return {name: tuple(value.shape) for name, value in cast(dict[str, Tensor], argument).items()}
    return tuple(argument.shape) if isinstance(argument, Tensor) else argument


def _nothing_around(_: list[Tensor]) -> AbstractContextManager[None]:
    return nullcontext()


def recomputed(
    forward: Forward, trains: bool, again: Callable[[list[Tensor]], AbstractContextManager[None]] = _nothing_around
) -> Forward:
    """`forward` by torch_xla's own gradient checkpointing: XLA would merge what torch's recomputes with the first run.

    `trains`: the module has weights that want gradients. `again` is entered, with the floats among the inputs, around
    the second run.
    """
    from torch_xla.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        names = list(kwargs)
        values = [*args, *kwargs.values()]
        if not torch.is_grad_enabled() or not (trains or any(map(wants_gradient, values))):
            return forward(*args, **kwargs)

        def positional(*values: Any) -> Any:
            args_, kwargs_ = values[: len(args)], dict(zip(names, values[len(args) :], strict=True))
            if not torch.is_grad_enabled():  # the first run
                return forward(*args_, **kwargs_)
            with again([value for value in values if is_float(value)]):
                return forward(*args_, **kwargs_)

        return checkpoint(positional, *_one_with_gradient(values), use_reentrant=True, preserve_rng_state=False)

    return run


def _one_with_gradient(values: list[Any]) -> list[Any]:
    """Reentrant checkpointing silently drops weight gradients where no input wants one (after a frozen embedding)."""
    if any(map(wants_gradient, values)):
        return values
    first = next(index for index, value in enumerate(values) if is_float(value))
    return [*values[:first], values[first].detach().requires_grad_(), *values[first + 1 :]]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
