"""The frame of a command: its help, its usage errors, and errors of ours as sentences, each with its exit code."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from absl import flags

from portable_fsdp.runtime.errors import EXIT_FINISHED, EXIT_USAGE, ConfigError, PortableFSDPError

NOTHING_STARTED = "Nothing was started."
EXIT_NO_READER = 141  # 128 + SIGPIPE


def to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def to_stdout(text: str) -> None:
    """What a command was asked for. Raises SystemExit where nobody reads on, as behind `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's own last flush fails too
        raise SystemExit(EXIT_NO_READER) from None


@contextmanager
def errors_as_sentences() -> Generator[None]:
    """For a program of one's own: an error of ours ends it by its sentence and exit code, others by a traceback."""
    try:
        yield
    except PortableFSDPError as error:
        to_stderr(str(error))
        raise SystemExit(error.exit_code) from None


def number_of(flag: str, text: str) -> int | None:
    """What a flag that counts devices or hosts says; None for auto. Raises ConfigError."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{flag}: expected auto or a number of at least 1, found {text!r}.")
    return int(text)


def run_command(
    name: str,
    usage: str,
    values: flags.FlagValues,
    argv: list[str],
    body: Callable[[list[str]], int],
    *,
    say: Callable[[str], None] = to_stderr,
) -> int:
    """Run `body` with the words of `argv` that are no flags, which go to `values`; returns the exit code.

    `argv`: the arguments after the program's name. `body` may raise absl's flags.Error for words that it doesn't take.
    `say` prints the message of a PortableFSDPError, and `Nothing was started.` below that of a usage error.
    """
    if any(argument in ("--help", "-help", "-h", "--h") for argument in argv):
        to_stdout(usage)
        return EXIT_FINISHED
    try:
        return body(values([name, *argv])[1:])
    except flags.Error as error:
        print(f"{error}\n\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    except PortableFSDPError as error:
        message = str(error)
        if error.exit_code == EXIT_USAGE and NOTHING_STARTED not in message:
            message += f"\n{NOTHING_STARTED}"
        say(message)
        return error.exit_code
