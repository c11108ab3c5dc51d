"""Command lines: flags, help, usage errors, and our errors as messages with an exit code.

All commands take the same forms of flags: `--name=value` or `--name value`, `--switch`, `section.key=value` (leading
dashes are dropped, as in Hydra and torchtitan); no abbreviations.
"""

import argparse
import difflib
import importlib.util
import io
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, NoReturn, cast

from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    PortableFSDPError,
    without_passwords,
)
from portable_fsdp.runtime.host import keep_torch_tpu_out, pip_install
from portable_fsdp.runtime.signals import STOP_SIGNALS, starts_without

_OWN_PACKAGES = (
    *("absl", "accelerate", "annotated_types", "numpy", "psutil", "pydantic", "rich", "safetensors", "tokenizers"),
    *("torch", "transformers", "upath", "xxhash", "yaml", "gguf", "huggingface_hub", "packaging", "tqdm"),
)
"""The packages that every command may import."""

NOTHING_STARTED = "Nothing was started."

_IMPORT_HELP = "an accelerate or Trainer config; supplies defaults beneath --config; may be given several times"

EXIT_NO_READER = 141  # 128 + SIGPIPE


def to_stderr(message: str) -> None:
    """Print without passwords; ignores a terminal that can't be written to, so that the run continues."""
    with suppress(OSError):
        print(wrapped(without_passwords(message)), file=sys.stderr, flush=True)


def wrapped(text: str) -> str:
    """Break lines between words at the width of the terminal, or COLUMNS; a file or a pipe, and commands stay whole."""
    try:
        width = os.get_terminal_size(KeptOutput.stderr).columns or 80
    except OSError:  # not a terminal
        return text
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else width
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}

    def broken(line: str) -> str:  # a value stays beside its name
        if line.lstrip().startswith("python "):
            return line
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line.replace(": ", ":\0"), width, subsequent_indent=indent, **whole).replace("\0", " ")

    return text if width < 20 else "\n".join(map(broken, text.split("\n")))


def say_once_per_host(message: str) -> None:
    """Print an error once per host: usually all processes have it, and the launcher ends the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(15)  # still alive after that: the first process doesn't have the error
        message = f"[process {os.environ.get('RANK')}] {message}"
    to_stderr(message)


class LogLines(logging.Formatter):
    """Log formatter that hides passwords. Debug lines, of `launch --verbose`, begin with the time since the start.
    Lines with a date, of a file, stay whole."""

    def format(self, record: logging.LogRecord) -> str:
        time_ = f"{record.relativeCreated / 1000:8.2f} s  " if record.levelno == logging.DEBUG else ""
        line = time_ + without_passwords(super().format(record))
        return line if self.datefmt else wrapped(line)


def to_stdout(text: str) -> None:
    """Print a command's answer; exit quietly on a broken pipe (`| head`)."""
    try:
        print(without_passwords(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's own last flush fails too
        raise SystemExit(EXIT_NO_READER) from None


def configure_log(process_index: int, *, verbose: bool = False) -> None:
    """Send the log `portable_fsdp` to stderr: all of process 0, and warnings of other processes with their index.

    `verbose`: debug lines of process 0 too, from now on.
    """
    handler = logging.StreamHandler()
    prefix = "" if process_index == 0 else f"[process {process_index}] "
    handler.setFormatter(LogLines(f"{prefix}%(message)s"))
    logger = logging.getLogger("portable_fsdp")
    logger.handlers[:] = [handler]
    level = logging.DEBUG if verbose or logger.level == logging.DEBUG else logging.INFO
    logger.setLevel(level if process_index == 0 else logging.WARNING)
    logger.propagate = False  # a root handler (absl's, which jax installs) would print every line twice


@contextmanager
def errors_as_sentences() -> Generator[None]:
    """End a user's program with message and exit code on our errors; other errors keep their traceback."""
    try:
        yield
    except PortableFSDPError as error:
        to_stderr(str(error))
        raise SystemExit(error.exit_code) from None


def number_of(flag: str, text: str) -> int | None:
    """Parse a flag that counts devices or hosts; None for auto. Raises ConfigError for anything but a number >= 1."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{flag}: expected auto or a number of at least 1, found {text!r}.")
    return int(text)


class CommandParser(argparse.ArgumentParser):
    """Parser for flags of `python -m portable_fsdp.COMMAND`, on the command line or in files (absl's `--flagfile`).

    Accepts `--dry-run` for `--dry_run`.
    """

    def __init__(self, command: str = "", description: str = "", **options: Any) -> None:
        super().__init__(
            prog=options.pop("prog", f"python -m portable_fsdp.{command}"),
            description=description.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )
        self.add_argument("--flagfile", metavar="FILE", help="read flags from a file, one per line")
        self.foreign_hint: Callable[[str, str], str] | None = None
        """(name, value) of an unknown flag -> what to write here if another tool has it; else empty."""

    def switch(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def config_flags(self, help: str) -> None:
        self.add_argument("--config", action=Once, metavar="FILE", help=help)
        self.add_argument("--import", action="append", default=[], dest="imports", metavar="FILE", help=_IMPORT_HELP)

    def auto_flags(self, helps: Mapping[str, str]) -> None:
        for name, help in helps.items():
            self.add_argument(f"--{name}", default="auto", help=help)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._without_unknown(super().parse_known_args(self._prepared(args), namespace))

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Since Python 3.12.8 it no longer calls parse_known_args; before, words are prepared twice, without effect.
        return self._without_unknown(super().parse_known_intermixed_args(self._prepared(args), namespace))

    def _prepared(self, args: Sequence[str] | None) -> list[str]:
        words = self._with_flagfiles(list(sys.argv[1:] if args is None else args))
        self._words = [*_overrides_without_dashes(map(_with_underscores, words))]
        return self._words

    def _without_unknown(self, parsed: tuple[Any, list[str]]) -> tuple[Any, list[str]]:
        for word in parsed[1]:
            if word.startswith("-"):
                flag, equals, value = word.partition("=")
                following = self._words[self._words.index(word) + 1 :][:1]
                if not equals and following and not following[0].startswith("-"):
                    [value] = following
                known = list(self._option_string_actions)
                near = [name for name in known if len(flag) == 2 and name.startswith(f"-{flag}")]  # -c: --config
                near = near or difflib.get_close_matches(flag, known, n=1)
                hint = f"nearest: {near[0]}" if near else ""
                if self.foreign_hint is not None:
                    hint = self.foreign_hint(flag[2:], value) or hint
                self.error(f"unknown flag {flag}" + (f"; {hint}" if hint else ""))
        return parsed

    def _with_flagfiles(self, words: list[str]) -> list[str]:
        if not any(word.startswith("--flagfile") for word in words):
            return words
        from absl import flags  # imported here: the doctor runs without any package

        try:
            return flags.FlagValues().read_flags_from_files(words, force_gnu=True)
        except flags.Error as error:
            self.error(str(error))

    def print_help(self, file: Any = None) -> None:
        to_stdout(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        to_stderr(f"{message}\n{self.format_usage().rstrip()}\n  See --help.")
        raise SystemExit(EXIT_USAGE)


class Once(argparse.Action):
    """A flag that may be given only once: with two config files it would be unclear which counts."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string}={values}: already given as {getattr(namespace, self.dest)}")
        setattr(namespace, self.dest, values)


def at_least(least: float, number: type[int] | type[float]) -> Callable[[str], float]:
    """Return the type of a flag: a finite number of at least `least`."""

    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            kind = "whole number" if number is int else "number"
            raise argparse.ArgumentTypeError(f"expected a {kind} of at least {least}, found {text}")
        return value

    return parse


def _with_underscores(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _overrides_without_dashes(words: Iterable[str]) -> Iterator[str]:
    """`--optim.lr=1e-3` and `--optim.lr 1e-3` as `optim.lr=1e-3`."""
    queue = deque(words)
    while queue:
        word = queue.popleft()
        if re.match(r"--[a-z_0-9]+\.[a-z_0-9.]+(=|$)", word):
            has_value = bool(queue) and not queue[0].startswith("--")
            word = word[2:] if "=" in word else f"{word[2:]}={queue.popleft() if has_value else 'true'}"
        yield word


def run_command(
    parser: CommandParser,
    argv: list[str],
    body: Callable[[argparse.Namespace], int],
    *,
    say: Callable[[str], None] = to_stderr,
    starts_a_run: bool = False,
) -> int:
    """Run `body` with the parsed arguments after the program's name; returns the exit code.

    `say` prints the message of a PortableFSDPError. A command that starts a run says `Nothing was started.` below a
    usage error, unless training has begun: an engine refuses some models only when it compiles the step.
    """
    keep_torch_tpu_out()
    try:
        options = parser.parse_intermixed_args(argv)
    except SystemExit as end:  # from argparse, after --help or an unknown flag
        return end.code if isinstance(end.code, int) else EXIT_FINISHED
    try:
        return body(options)
    except PortableFSDPError as error:
        is_early = starts_a_run and error.exit_code == EXIT_USAGE and not error.run_has_started
        say(f"{error}\n{NOTHING_STARTED}" if is_early else str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_FAILED if starts_a_run else EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if not (message := _missing_package(error)):
            raise
        say(message + f"\n{NOTHING_STARTED}" * starts_a_run)
        return EXIT_USAGE


def _missing_package(error: BaseException) -> str:
    """Return the message for a required package that isn't installed; empty for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    is_missing = name in _OWN_PACKAGES and importlib.util.find_spec(name) is None
    return f"The package {name} is not installed: {pip_install()}" if is_missing else ""


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a command that lacks a package: its modules import packages before `run_command` runs."""
    if message := _missing_package(error):
        to_stderr(message)
        raise SystemExit(EXIT_USAGE)
    sys.__excepthook__(kind, error, trace)


log = logging.getLogger("portable_fsdp")

_TIME = "%Y-%m-%dT%H:%M:%S%z"
_LAST_LINES_S = 0.5


def stderr_file(run: Path, process: int) -> Path:
    return run / "logs" / f"stderr-{process}.log"


class RunLog(logging.Handler):
    """Buffers lines until `open`, then appends them to run.log, each with its time (ISO 8601, seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LogLines("%(asctime)s %(levelname)s %(message)s", _TIME))
        self.path: Path | None = None
        self._held: list[str] = []

    def open(self, run: Path) -> None:
        self.path = run / "logs" / "run.log"
        self._write(self.path)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # arguments that don't fit the message: the terminal's handler reports it
            self._held.append(f"{self.format(record)}\n")
        if self.path:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(self._held)
        except OSError as error:
            self.setLevel(logging.CRITICAL + 1)  # don't try again
            to_stderr(_dropped(path, error))
        self._held.clear()


def _dropped(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror}; the run continues without this log"


@contextmanager
def run_log(process: int) -> Generator[RunLog]:
    """Collect the log `portable_fsdp` and the warnings of transformers (not on the terminal), only on process 0."""
    from transformers.utils import logging as transformers_log

    handler = RunLog()
    if process != 0:
        handler.setLevel(logging.CRITICAL + 1)
    log.addHandler(handler)
    transformers_log.disable_default_handler()
    transformers_log.add_handler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        transformers_log.remove_handler(handler)
        transformers_log.enable_default_handler()


class KeptOutput:
    """Context manager: captures output to file descriptors 1 and 2, including output of C code.

    `hold_stdout` keeps output of C code to stdout (gloo prints the connected ranks) off the terminal; Python's stdout
    still goes there. `begin` writes it to the process's log, and then lets `tee` copy stderr there, so that the last
    lines of a crash reach both. Does nothing if Python's streams are replaced, as in a notebook.
    """

    stderr: ClassVar[int] = 2  # the descriptor of stderr before `begin`

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._held: IO[bytes] = io.BytesIO()
        self._release: Callable[[], object] = lambda: None
        self._is_ours = sys.stdout is not None and sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__

    def __enter__(self) -> "KeptOutput":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else a traceback follows, which should reach the log
            self._undo.close()

    def hold_stdout(self) -> None:
        """Hold output of C code to stdout until `begin`."""
        if not self._is_ours:
            return
        stdout = sys.stdout
        with suppress(OSError):  # no room for temporary files
            stdout.flush()
            self._held = self._undo.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            terminal = os.fdopen(os.dup(1), "w", 1 if stdout.isatty() else -1, stdout.encoding, stdout.errors)
            self._undo.callback(setattr, sys, "stdout", stdout)
            sys.stdout = self._undo.enter_context(terminal)
            self._release = _redirect(1, self._held.fileno())
            self._undo.callback(self._release)

    def begin(self, run: Path, process: int) -> None:
        """Append to this process's log; the run's folder must exist."""
        if not self._is_ours:
            return
        self._release()
        self._held.seek(0)
        path = stderr_file(run, process)
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(f"--- {time.strftime(_TIME)}\n".encode() + self._held.read())
            # In its own session: Ctrl-C at the terminal reaches only the run. Schedulers signal all processes of a job.
            with starts_without(*STOP_SIGNALS):
                tee = subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        except OSError as error:
            to_stderr(_dropped(path, error))
            return
        self._undo.callback(_wait, tee)
        with cast(IO[bytes], tee.stdin) as pipe:
            KeptOutput.stderr = os.dup(2)
            self._undo.callback(os.close, KeptOutput.stderr)
            self._undo.callback(setattr, KeptOutput, "stderr", 2)
            self._undo.callback(_redirect(2, pipe.fileno()))


@contextmanager
def stderr_into(path: Path) -> Generator[None]:
    """Redirect stderr, including output of C code, to the end of this file, if it can be opened."""
    with ExitStack() as undo:
        with suppress(OSError):
            undo.callback(_redirect(2, undo.enter_context(path.open("ab")).fileno()))
        yield


def _redirect(descriptor: int, to: int) -> Callable[[], object]:
    """Redirect a descriptor; returns a function that restores it."""
    before = os.dup(descriptor)
    os.dup2(to, descriptor)
    return lambda: os.dup2(before, descriptor)


def _wait(tee: "subprocess.Popen[bytes]") -> None:
    with suppress(subprocess.TimeoutExpired):  # a child process that holds our stderr open keeps tee running
        tee.wait(_LAST_LINES_S)
