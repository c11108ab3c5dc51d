"""User functions in a config: `module:function`."""

import importlib
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from portable_fsdp.runtime.errors import ConfigError, PortableFSDPError, TrainingError
from portable_fsdp.runtime.hub import before_transformers
from portable_fsdp.runtime.signals import is_signal

FACTORY_PATTERN = r"^[^\s:]+:[^\s:]+$"


class UserExit(TrainingError):
    """User code raised SystemExit or another exception outside Exception. It is an error, not the end of a run."""


@contextmanager
def user_code(name: str = "user code") -> Generator[None]:
    """Convert SystemExit to UserExit, with a message that begins with `name`; signals and Exceptions pass through."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or is_signal(error):
            raise
        fix = "Raise an Exception for an error. To stop a run after a save, send SIGTERM."
        raise UserExit(f"{name} raised {described(error)}\n  {fix}") from error


@contextmanager
def user_errors(name: str, problem: str, kind: type[PortableFSDPError], advice: str = "") -> Generator[None]:
    """Like `user_code(name)`; also convert Exceptions to `kind`: problem, line of the user's code, advice."""
    with user_code(name):
        try:
            yield
        except Exception as error:
            raise kind(f"{problem}: {described(error)}{advice}") from error


def search_folder(folder: Path) -> None:
    """Search modules in `folder` first, as Python does for a script."""
    path = str(folder.absolute())
    if path not in sys.path:
        sys.path.insert(0, path)


def load_factory(key: str, name: str) -> Callable[..., Any]:
    """Import the function `name` (`module:function`). `key`: its config key, for messages.

    Modules are searched in the config's folder and on PYTHONPATH. Raises ConfigError if the module can't be imported or
    has no such function.
    """
    before_transformers()  # the module may import transformers
    module_name, _, attribute = name.partition(":")
    advice = "\n  Modules are searched in the config's folder and on PYTHONPATH."
    with user_errors(f"{key}: the import of {module_name}", f"{key}: {name} can't be imported", ConfigError, advice):
        function = getattr(importlib.import_module(module_name), attribute)
    if not callable(function):
        raise ConfigError(f"{key}: expected a function, found {name} = {function!r}.")
    return function


def call_factory(key: str, name: str, *arguments: Any) -> Any:
    """Import and call a user function. Raises ConfigError, with the line of the user's code, if it raises."""
    return call_user(f"{key}: {name}", load_factory(key, name), *arguments)


def call_user(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user function. Raises ConfigError, with a message that begins with `name`, if it raises."""
    with user_errors(name, f"{name} failed", ConfigError):
        return function(*arguments)


def described(error: BaseException) -> str:
    """Format the error's class, message, and the last line of user code in its traceback, if any."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}\n  in {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    package, stdlib = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)
    libraries = ("site-packages", "dist-packages", "<frozen", package, stdlib)
    own = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
    return f"{text}\n  in {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else text
