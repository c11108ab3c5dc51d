"""Run a function as one program of torch_xla, or refuse it and name the line of the model that prevents it.

To find that line the function runs again under torch's anomaly mode, which knows the forward of each gradient.
"""

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from portable_fsdp.runtime.errors import BackendError

T = TypeVar("T")


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
