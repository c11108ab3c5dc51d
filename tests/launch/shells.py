"""Runs scripts with programs of a test's own in place of those that need a cluster or a cloud."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
        """A program of this folder, which is told by what name it was called."""
        self.install(name, f'#!/bin/sh\nFAKE={name} exec "{sys.executable}" -ES "{FAKES / fake}" "$@"\n')

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            "PATH": str(self.programs),
            "HOME": os.environ.get("HOME", "/"),
            "RECORD": str(self.record),
            "CLOUD": str(self.cloud),
            **variables,
        }

    def run(
        self, *argv: str | Path, variables: dict[str, str] | None = None, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**(variables or {}))
        return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[list[str]]:
        """The argument lists recorded since the last look."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]
