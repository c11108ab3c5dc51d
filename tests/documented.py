"""The commands that the documents show, and the launchers before the programs in them, whose flags are checked."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# Flags that the documents use, and what follows each: "" nothing, "=" a value after this sign, " " the next word. From
# slurm.schedmd.com/srun.html, the man page of mpirun, and docs.docker.com/reference/cli/docker/container/run.
SRUN = {"--ntasks-per-node": "=", "--gpus-per-node": "=", "--nodes": "=", "--kill-on-bad-exit": "="}
MPIRUN = {"-np": " ", "-x": " "}
DOCKER_RUN = {"--rm": "", "--privileged": "", "--gpus": "=", "--ipc": "=", "--net": "=", "--shm-size": "=", "-v": " "}


class Command(NamedTuple):
    """One command of a fenced block: where it stands, and its words without leading `NAME=value`."""

    where: str
    words: list[str]
    variables: dict[str, str]


class Program(NamedTuple):
    """What a launcher starts: `python ...`, in so many processes, as far as the command says it."""

    words: list[str]
    processes: int | None


def commands(text: str, where: str) -> Iterator[Command]:
    """The commands of the ```bash blocks, but for blocks that begin with `# not run here: <reason>`."""
    for block in re.finditer(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if re.match(r"# not run here: \S", block[1]):
            continue
        first = text.count("\n", 0, block.start(1)) + 1
        for number, line in enumerate(block[1].replace("\\\n", "  ").splitlines(), start=first):
            words = shlex.split(line, comments=True)
            variables: dict[str, str] = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words:
                yield Command(f"{where}:{number}", words, variables)


def program_of(words: list[str]) -> Program:
    """Without the launcher; fails where that doesn't know one of its flags, or lacks a value."""
    match words:
        case ["torchrun", *rest]:
            return _of_torchrun(rest)
        case ["accelerate", "launch", *rest]:
            return _of_accelerate(rest)
        case ["srun", *rest]:
            return Program(_options(rest, SRUN)[1], None)
        case ["mpirun", *rest]:
            given, program = _options(rest, MPIRUN)
            return Program(program, int(given["-np"]))
        case ["docker", "run", *rest]:
            image, *program = _options(rest, DOCKER_RUN)[1]
            name, _, kind = image.partition(":")
            assert name == "portable_fsdp", f"{image}: no image of docs/launching.md"
            assert (ROOT / f"launch/Dockerfile.{kind}").is_file(), f"{image}: no launch/Dockerfile.{kind}"
            return Program(program, None)
        case _:
            return Program(words, None)


def _of_torchrun(words: list[str]) -> Program:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False  # torchrun takes the beginning of a flag for the flag; a document writes it out
    flags = parser.parse_args(words)
    sizes = [flags.nnodes.partition(":")[0], flags.nproc_per_node]
    processes = int(sizes[0]) * int(sizes[1]) if all(size.isdecimal() for size in sizes) else None
    return _started(flags, processes)


def _of_accelerate(words: list[str]) -> Program:
    from accelerate.commands.launch import launch_command_parser

    flags = launch_command_parser().parse_args(words)
    if flags.config_file and flags.num_processes is None:
        return _started(flags, int(yaml.safe_load((ROOT / flags.config_file).read_text())["num_processes"]))
    return _started(flags, flags.num_processes)


def _started(flags: argparse.Namespace, processes: int | None) -> Program:
    return Program(["python", *["-m"] * flags.module, flags.training_script, *flags.training_script_args], processes)


def _options(words: list[str], known: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The options before the program, all of them known, and the words from the program on."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, sign, value = rest.pop(0).partition("=")
        assert name in known, f"{name}: unknown flag; those that the documents use: {', '.join(known)}"
        assert sign == known[name].strip(), f"{name}: expected '{name}{known[name]}{'VALUE' * bool(known[name])}'"
        given[name] = rest.pop(0) if known[name] == " " else value
        assert bool(given[name]) == bool(known[name]), f"{name}: expected a value"
    return given, rest
