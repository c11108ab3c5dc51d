"""Run functions as programs of torch_xla: count the compilations, name the cause of one too many, and refuse a function
that makes no program by the line of the model that prevents it.

To find that line the function runs again under torch's anomaly mode, which knows the forward of each gradient.
"""

import logging
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from portable_fsdp.backends.contract import Metrics
from portable_fsdp.runtime.errors import BackendError

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")


class Compiler(Protocol):
    """Compiles functions into programs, as `Backend.compile`, and counts them."""

    compilations: int

    def compile(self, fn: Callable[..., Metrics], name: str, shapes: int = 1) -> Callable[..., Metrics]:
        """Compile `fn`. `shapes`: number of shapes that its inputs may have; each has its program."""
        ...

    def watch(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Record at each update what else a program depends on: which gradients exist, and the optimizer's numbers."""

    def run_pending(self) -> None:
        """Run pending operations as a program, and count what it compiles."""

    def wait(self) -> None:
        """Run pending operations, and wait for all programs."""


class Programs:
    """Functions that XLA compiles as they are called: counts compilations, and warns of unexpected ones."""

    def __init__(self, engine: str) -> None:
        self._engine, self.compilations, self._failed = engine, 0, False
        self._counted = _compile_count()  # up to the last `run_pending`
        self._at_update: dict[str, Any] = {}

    def wait(self) -> None:
        import torch_xla

        torch_xla.sync(wait=True)

    def run_pending(self) -> None:
        import torch_xla

        torch_xla.sync()
        self.compilations, self._counted = self.compilations + _compile_count() - self._counted, _compile_count()

    def watch(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        def note(*_: Any) -> None:
            for at, group in enumerate(optimizer.param_groups):
                numbers = {key: value for key, value in group.items() if type(value) in (int, float, tuple)}
                self._at_update |= {f"{key} of optimizer group {at}": value for key, value in numbers.items()}
            self._at_update |= {
                f"the gradient of {name}": "absent" if weight.grad is None else "present"
                for name, weight in parameters.items()
                if weight.requires_grad
            }

        optimizer.register_step_pre_hook(note)

    def compile(self, fn: Callable[..., Metrics], name: str, shapes: int = 1) -> Callable[..., Metrics]:
        compiled, compiled_for, last = 0, set[str](), dict[str, Any]()

        def step(*args: Any) -> Metrics:
            nonlocal compiled, last
            if self._failed:  # weights wait for the first operations of a program that then failed
                self.wait()
            before, self._at_update, self._failed = _compile_count(), {}, True
            out = run_program(partial(_from_one_seed, fn, *args), f"backend {self._engine}: program {name!r}", name)
            self._failed = False
            new = _compile_count() - before
            self._counted = _compile_count()
            inputs = _described(args)
            facts, previous = inputs | self._at_update, last
            compiled, last, self.compilations = compiled + new, facts, self.compilations + new
            if not new:
                return out
            compiled_for.add(str([fact for fact in inputs.values() if isinstance(fact, str)]))
            if compiled > (expected := min(len(compiled_for), shapes)):
                changed = [key for key in {**previous, **facts} if previous.get(key) != facts.get(key)]
                # A number is usually an input of the program: it may change without being the cause.
                causes = [key for key in changed if isinstance(facts.get(key, ""), str)] or changed
                log.warning(
                    "backend %s: program %r was compiled %d times, expected %s. Cause: %s.",
                    self._engine,
                    name,
                    compiled,
                    "once" if expected == 1 else f"{expected} times, once per shape of its rows",
                    "; ".join(f"{key} changed from {previous.get(key)} to {facts.get(key)}" for key in causes[:4])
                    or "no input, gradient or optimizer number changed, so other operations ran: in the forward (a "
                    "Python branch, a random choice or a counter in the model), in an optimizer of your own, or "
                    "between the steps, on weights or optimizer state; XLA_SAVE_TENSORS_FILE=FILE shows them",
                )
            return out

        return step


def _from_one_seed(fn: Callable[..., Metrics], *args: Any) -> Metrics:
    """Recomputation sets XLA's seed, from which the next program's follows: set it as it was, whatever ran."""
    from torch_xla.core import xla_model

    seed = cast(Any, xla_model).get_rng_state()
    out = fn(*args)
    cast(Any, xla_model).set_rng_state(seed)
    return out


def _compile_count() -> int:
    import torch_xla.debug.metrics as counters

    data = cast(Any, counters).metric_data("CompileTime")
    return int(data[0]) if data else 0


def _described(args: Sequence[Any]) -> dict[str, Any]:
    """Name -> input of a program: the shape and dtype of a tensor, or a Python number."""
    named: dict[str, Any] = {}
    for number, argument in enumerate(args):
        named |= argument if isinstance(argument, dict) else {f"argument {number}": argument}
    return {
        name: f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else value
        for name, value in named.items()
        if not isinstance(value, bool)
    }


def run_program(run: Callable[[], T], what: str, name: str) -> T:
    """Compile and run a function as one program. Raises BackendError, prefixed by `what`, if it needs several.

    Unlike torch_xla.compile(full_graph=True) this checks backward too, and compiles nothing of a function that fails.
    """
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    torch_xla.sync()  # earlier operations are not part of the program
    bridge._set_current_graph_name(name)
    before, runs = _runs(), Counter[str]()
    bridge._set_allow_execution(False)
    try:
        try:
            result = run()
        finally:
            runs = _runs() - before
            bridge._set_allow_execution(True)
        if runs:
            raise _OnHost(runs)
        torch_xla.sync()
    except Exception as error:
        if "device_ready_queues_" in str(error):  # torch counts the devices in a process's first backward
            raise BackendError(
                f"{what}: a backward ran in this process before its first engine on XLA opened.\n"
                "  Start a new process, and open the engine before any backward."
            ) from error
        if "Checkpointing is not compatible with .grad()" in str(error):  # torch's reentrant one
            raise BackendError(
                f"{what}: torch.autograd.grad can't run through layers that backward recomputes.\n"
                "  Set memory.gradient_checkpointing=none, or train this model with --backend=native."
            ) from error
        if (problem := _problem(run, error, runs)) is None:
            raise
        raise BackendError(
            f"{what}: XLA can't compile it: {problem}\n  Use operations whose shapes don't depend on values "
            "(torch.where for masks), and no .item() or `if` on a tensor, or train this model with --backend=native."
        ) from error
    return result


class _OnHost(Exception):
    """Operations ran outside a program; the argument counts them."""


class _Watch(TorchDispatchMode):
    """Raises _OnHost at the first such operation, in forward or backward; if `one_by_one`, at the first that fails."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self._one_by_one = one_by_one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _runs()
        try:
            out = func(*args, **(kwargs or {}))
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"{func}: {error}") from error
        if not self._one_by_one and (runs := _runs() - before):
            raise _OnHost(runs)
        return out


def _problem(run: Callable[[], object], error: Exception, runs: Counter[str]) -> str | None:
    """Describe what fails, and where; None for an error without a line of the model, or of the model itself."""
    is_early = "Unexpected execution" in str(error)
    where = _line(error)
    is_own = where and not is_early and not re.search("Check failed|RET_CHECK|torch_xla/csrc", str(error))
    if is_own or "RESOURCE_EXHAUSTED" in str(error):  # too large for the devices
        return None
    if where is None:
        # If all operations of the function can be traced, one of them can't be compiled.
        error, where = _run_again(run, False) or _run_again(run, True) or (error, None)
        runs = error.args[0] if isinstance(error, _OnHost) else runs
    if runs or is_early:
        operations = ", ".join(sorted(filter(None, runs)))
        ran = f"{operations} would run on the host" if operations else "a value is read on the host"
        return f"{ran}{where or ''}\n  All devices would wait for that in each step."
    return where and f"torch_xla fails{where}\n  {str(error).strip().splitlines()[0][:200]}"


def _run_again(run: Callable[[], object], one_by_one: bool) -> tuple[Exception, str | None] | None:
    """Return a function's first failure and its line; None: nothing fails. `one_by_one`: compile each operation."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    bridge._set_use_eager_mode(one_by_one)
    notes: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as notes, torch.autograd.set_detect_anomaly(True, check_nan=False):
            warnings.simplefilter("always")
            with _Watch(one_by_one):
                run()
    except Exception as error:
        forward = re.findall(r'File "(.+)", line (\d+), in .*\n +(.*)', "".join(str(note.message) for note in notes))
        lines = [f" in the backward of\n  {_short(at)}:{line}: {code}" for at, line, code in forward if _is_own(at)]
        return error, _line(error) or (lines[-1] if lines else None)
    finally:
        bridge._set_use_eager_mode(False)
    return None


def _line(error: Exception) -> str | None:
    """Return the model's line that raised an error; None in the backward of torch's operations."""
    frames = traceback.extract_tb(error.__traceback__)
    begin = max((at for at, frame in enumerate(frames) if frame.name == "_engine_run_backward"), default=-1)
    own = [frame for frame in frames[begin + 1 :] if _is_own(frame.filename)]
    return f" in\n  {_short(own[-1].filename)}:{own[-1].lineno}: {own[-1].line}" if own else None


def _is_own(file: str) -> bool:
    """Whether a file is the model's: neither torch's nor one that makes programs."""
    ours = (__file__, str(Path(__file__).with_name("runtime.py")))
    return file not in ours and not any(f"/site-packages/{package}/" in file for package in ("torch", "torch_xla"))


def _short(file: str) -> str:
    return file.removeprefix(f"{Path(torch.__file__).parent.parent}/")


def _runs() -> Counter[str]:
    """Count what has run in this process: operations on the host, and (under "") programs."""
    import torch_xla.debug.metrics as metrics
    import torch_xla.runtime as runtime

    names = [name for name in cast(Any, metrics).counter_names() if "::" in name and not name.startswith("xla::")]
    counts = Counter({name: cast(Any, metrics).counter_value(name) or 0 for name in names})
    # Otherwise devices may be threads, which count together.
    if runtime.is_spmd() or runtime.addressable_device_count() == 1:
        counts[""] = sum(cast(Any, metrics).counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))
    return counts
