"""The commands that the documents show, and the launchers before the programs in them, whose flags are checked."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# The flags that the documents use. From slurm.schedmd.com/srun.html, the man page of mpirun, and
# docs.docker.com/reference/cli/docker/container/run.
FLAGS = {
    "srun": r"--(?:ntasks-per-node|gpus-per-node|nodes|kill-on-bad-exit)=\S+",
    "mpirun": r"-np \d+|-x \S+",
    "docker": r"--rm|--privileged|--(?:gpus|ipc|net|shm-size)=\S+|-v \S+",
}


class Command(NamedTuple):
    """One command of a fenced block: its page and line, and its words without leading `NAME=value`."""

    where: str
    words: list[str]
    variables: dict[str, str]


class Program(NamedTuple):
    """The program that a launcher starts: `python ...`, and the number of processes if the command sets it."""

    words: list[str]
    processes: int | None


def commands(text: str, where: str) -> Iterator[Command]:
    """The commands of the ```bash blocks, but for those after a line `<!-- not run by tests: REASON -->`."""
    for block in re.finditer(r"(?ms)^(<!-- not run by tests: \S[^\n]* -->\n)?```bash\n(.*?)^```", text):
        if block[1]:
            continue
        first = text.count("\n", 0, block.start(2)) + 1
        for number, line in enumerate(block[2].replace("\\\n", "  ").splitlines(), start=first):
            words = shlex.split(line, comments=True)
            variables: dict[str, str] = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words:
                yield Command(f"{where}:{number}", words, variables)


def blocks(page: str, language: str) -> list[str]:
    """The texts of the page's fenced blocks of one language; `page`: below the checkout."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def program_of(words: list[str]) -> Program:
    """The program without the launcher; fails where the launcher doesn't know one of its flags, or lacks a value."""
    match words:
        case ["torchrun", *rest]:
            from torch.distributed.run import get_args_parser

            parser = get_args_parser()
            parser.allow_abbrev = False  # torchrun takes the beginning of a flag for the flag; a document writes it out
            flags = parser.parse_args(rest)
            processes = int(flags.nnodes.partition(":")[0]) * int(flags.nproc_per_node)
        case ["accelerate", "launch", *rest]:
            from accelerate.commands.launch import launch_command_parser

            flags = launch_command_parser().parse_args(rest)
            processes = flags.num_processes
            if processes is None and flags.config_file:
                processes = int(yaml.safe_load((ROOT / flags.config_file).read_text())["num_processes"])
        case ["srun" | "mpirun" as launcher, *rest] | ["docker" as launcher, "run", *rest]:
            parts = re.fullmatch(rf"((?:(?:{FLAGS[launcher]}) )*)([^-].*)", shlex.join(rest))
            assert parts, f"{launcher}: expected a program after the flags {FLAGS[launcher]}"
            program, count = shlex.split(parts[2]), re.search(r"-np (\d+)", parts[1])
            if launcher == "docker":
                kind = program.pop(0).removeprefix("portable_fsdp:")
                assert (ROOT / f"launch/Dockerfile.{kind}").is_file(), f"{kind}: no image of docs/launching.md"
            return Program(program, int(count[1]) if count else None)
        case _:
            return Program(words, None)
    return Program(["python", *["-m"] * flags.module, flags.training_script, *flags.training_script_args], processes)
