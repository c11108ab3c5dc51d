"""All commands: `portable-fsdp COMMAND ...`, or `python -m portable_fsdp COMMAND ...`; without COMMAND, a list of them.

Each command is also a module: `python -m portable_fsdp.launch ...`, or `torchrun -m portable_fsdp.launch ...`.
"""

import difflib
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from portable_fsdp import __version__
from portable_fsdp.runtime.command import CommandParser, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, EXIT_USAGE, UsageError

COMMANDS = {
    "launch": "train a model; rerun to resume",
    "init": "write a first config that fits, by six questions",
    "explain": "show what each engine does with each option of a config, and where its value comes from",
    "plan": "estimate memory and time on hardware that you don't have",
    "checkpoint": "list, show, verify, diff, export and import checkpoints",
    "evaluate": "print loss and perplexity of a run, checkpoint or exported model on any data",
    "sample": "print samples from an export or a model folder",
    "tune": "measure which settings are fastest on the devices that are here",
    "parity": "run the first steps on several engines and name the layer where they diverge",
    "report": "draw the history of a run, or send its metrics to a tracker",
    "doctor": "check this host: packages, devices, engines, rendezvous",
    "examples": "write configs, launch scripts and example programs into a new folder",
}

_EXAMPLES = ("configs", "launch", "examples")
_INSTALLED = "share/portable_fsdp"  # as pyproject.toml installs them


def main() -> int:
    """Run the command in sys.argv as `python -m portable_fsdp.COMMAND`; returns the exit code."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        to_stdout(_list_of_commands())
        return EXIT_FINISHED
    if command == "--version":
        to_stdout(__version__)
        return EXIT_FINISHED
    if command == "examples":
        return _examples(arguments)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        to_stderr(f"unknown command {command}" + (f"; nearest: {near[0]}" if near else "") + f"\n{_list_of_commands()}")
        return EXIT_USAGE
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"portable_fsdp.{command}", *arguments])


def _list_of_commands() -> str:
    lines = [f"  {name:<11} {about}" for name, about in COMMANDS.items()]
    return "\n".join(["usage: portable-fsdp COMMAND ...   (COMMAND --help lists its flags)", "", *lines])


def _examples(arguments: list[str]) -> int:
    about = "Write configs/, launch/ and examples/ into a new folder."
    parser = CommandParser("examples", about, prog="portable-fsdp examples")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder that doesn't exist, or is empty")

    def write(folder: Path) -> int:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(f"{folder}: already has files; name a new folder.")
        for name, path in _example_files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            to_stdout(str(target))
        return EXIT_FINISHED

    return run_command(parser, arguments, lambda options: write(options.folder))


def _example_files() -> list[tuple[Path, Path]]:
    """List (name inside the folder, path) of each example file: in the checkout, or installed by the wheel."""
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        paths = [path for folder in _EXAMPLES for path in sorted((checkout / folder).iterdir())]
        return [(path.relative_to(checkout), path) for path in paths if path.is_file()]  # not __pycache__
    installed = [file for file in metadata.files("portable-fsdp") or () if _INSTALLED in file.as_posix()]
    files = [file for file in installed if file.suffix != ".pyc"]
    return [(Path(file.as_posix().partition(f"{_INSTALLED}/")[2]), Path(str(file.locate()))) for file in files]


if __name__ == "__main__":
    sys.exit(main())
