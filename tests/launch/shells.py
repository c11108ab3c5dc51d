"""Runs scripts with programs of a test's own in place of those that need a cluster or a cloud."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from cli import TINY

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent
TRICKY = ['run.name=it\'s $HOME; `id` "&" *', "run.dir=a folder/ü", "data.path=corpus/**/*.txt", ""]

TOOLS = (
    *("bash", "cat", "dirname", "env", "gzip", "head", "mkdir", "pkill"),
    *("rm", "setsid", "sh", "sleep", "tail", "tar", "touch", "wc"),
)
"""All else that is on PATH: whoever runs these tests may have a real gcloud, signed in, whose TPUs cost money."""

RECORDER = f"""#!{sys.executable} -ES
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


class Shell:
    """`folder` is what a test has to itself: `bin` is all of PATH, `cloud` belongs to the fakes."""

    def __init__(self, folder: Path, *recorders: str) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.record = folder / "record.jsonl"
        self.cloud = folder / "cloud"
        self.programs.mkdir()
        self.cloud.mkdir()
        for name in TOOLS:
            tool = shutil.which(name)
            assert tool, f"{name} isn't installed"
            (self.programs / name).symlink_to(tool)
        for name in recorders:
            self.install(name, RECORDER)

    def install(self, program: str | Path, text: str) -> None:
        """`program`: a name, or a path elsewhere."""
        path = self.programs / program
        path.unlink(missing_ok=True)  # it may be a link to the machine's own
        path.write_text(text)
        path.chmod(0o755)

    def install_fake(self, name: str, fake: str) -> None:
        """A program of this folder, whose first argument is the name that it was called by."""
        self.install(name, f'#!/bin/sh\nexec "{sys.executable}" -ES "{FAKES / fake}" {name} "$@"\n')

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            "PATH": str(self.programs),
            "HOME": os.environ.get("HOME", "/"),
            "RECORD": str(self.record),
            "CLOUD": str(self.cloud),
            **variables,
        }

    def run(self, cwd: Path, *argv: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**variables)
        return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[list[str]]:
        """The argument lists recorded since the last look."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


PYTHON = f"""{RECORDER}
if "torch.cuda" in " ".join(sys.argv):
    print(os.environ.get("GPUS", ""))
elif "GPUS" in os.environ:
    os.environ["PYTHONPATH"] = "{ROOT}"
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
COMMAND = re.compile("'--command=.*", re.DOTALL)
CLOUD = {"HAS": "slice.json", "NEXT": "creations.json", "SSH": "answers.json"}
WORDS = {
    "$TRICKY": shlex.join(TRICKY),
    "$SLICE": "TPU_NAME=slice TPU_ZONE=us-east5-b TPU_POLL_S=0",
    "$TYPED_SLICE": "TPU_NAME=slice TPU_ZONE=us-east5-b TPU_POLL_S=0 TPU_TYPE=v6e-16",
}


def new_shell(folder: Path) -> Shell:
    """In its `checkout`, which `setup` writes an archive into, are the scripts and a tiny config."""
    shell = Shell(folder, "torchrun")
    for name in ("sbatch", "srun", "scontrol"):
        shell.install_fake(name, "fake_launchers.py")
    shell.install_fake("gcloud", "fake_gcloud.py")
    shell.install("python", PYTHON)
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    (checkout / "configs").symlink_to(ROOT / "configs")
    for kept_or_not in ("portable_fsdp/launch.py", ".venv/x", ".venv-latest/x", ".git/x", "runs/x", "build/x"):
        (checkout / kept_or_not).parent.mkdir(parents=True, exist_ok=True)
        (checkout / kept_or_not).touch()
    (checkout / "run").mkdir()
    (checkout / "run/STOPPED").touch()  # of an earlier life
    (checkout / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    text = (ROOT / "launch/slurm.sbatch").read_text()
    (checkout / "wrong.sbatch").write_text(text.replace("--requeue", "--requeu"))
    return shell


def play(title: str, line: str, folder: Path) -> str:
    """What comes of a command: exit code, first line of its message and the lines of the script, output, calls.

    Before it may stand, besides its own variables: GPUS, those that torch sees (without it python only records); HAS,
    the states of the TPU that is there; NEXT, those of the next ones; SSH, the exit codes of ssh; TORCHRUN, that of
    torchrun; WITHOUT, a program that isn't installed. Where `title` has "workers", their commands are shown whole.
    """
    folder.mkdir()
    shell = new_shell(folder)
    variables: dict[str, str] = {}
    words = shlex.split(re.sub(r"\$[A-Z_]+", lambda name: WORDS[name[0]], line))
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    for name, file in CLOUD.items():
        if name in variables:
            values = variables.pop(name).split(",")
            states = [int(value) for value in values] if name == "SSH" else values
            (shell.cloud / file).write_text(json.dumps([states] if name == "NEXT" else states))
    if missing := variables.pop("WITHOUT", None):
        (shell.programs / missing).unlink()
    if code := variables.pop("TORCHRUN", None):
        shell.install("torchrun", f"#!/bin/sh\nexit {code}\n")
    done = shell.run(folder / "checkout", *words, **variables)
    lines = [f"exit {done.returncode}"]
    messages = enumerate(done.stderr.splitlines())
    lines += [f"says {text}" for number, text in messages if number == 0 or text.startswith(("tpu_", "torchrun.sh"))]
    lines += [f"prints {text}" for text in done.stdout.splitlines()]
    calls = [shlex.join(call) for call in shell.calls() if "describe" not in call]
    lines += [f"calls {call if 'workers' in title else re.sub(COMMAND, '--command=...', call)}" for call in calls]
    return "\n".join(lines).replace(str(folder), "FOLDER") + "\n"
