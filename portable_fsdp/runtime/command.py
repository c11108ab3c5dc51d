"""The frame of a command: its help, its usage errors, and errors of ours as sentences, each with its exit code."""

import sys
from collections.abc import Callable

from absl import flags

from portable_fsdp.runtime.errors import EXIT_FINISHED, EXIT_USAGE, PortableFSDPError


def to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


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
    `say` is told what a PortableFSDPError says.
    """
    if any(argument in ("--help", "-help", "-h", "--h") for argument in argv):
        print(usage)
        return EXIT_FINISHED
    try:
        return body(values([name, *argv])[1:])
    except flags.Error as error:
        print(f"{error}\n\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    except PortableFSDPError as error:
        say(str(error))
        return error.exit_code
