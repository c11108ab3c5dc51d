"""A gcloud for TPUs, for tests: a program that records its arguments, refuses unknown flags, and keeps TPUs as files.

In the folder $CLOUD: `NAME.json` are the states that a TPU goes through, one for each question (`error: ...`: one that
fails); `creations.json` those of the TPUs to come; `answers.json` the exit codes to come of ssh. With a folder
`homes` ssh really runs its command line, in `homes/NAME`, the home of a single worker.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# cloud.google.com/sdk/gcloud/reference/compute/tpus: those that the scripts may want.
ONE = {"--zone", "--project", "--quiet"}
WORKERS = {*ONE, "--worker", "--batch-size", "--internal-ip", "--tunnel-through-iap", "--ssh-key-file", "--ssh-flag"}
NEW = {*ONE, "--accelerator-type", "--spot", "--reserved", "--async", "--network", "--metadata", "--service-account"}
NODES = {"--runtime-version", "--node-id", "--node-count", "--node-prefix", "--guaranteed", "--valid-until-duration"}


def verbs(create: set[str], delete: set[str], workers: set[str]) -> dict[str, set[str]]:
    """The flags of each verb, with those that only this group has."""
    return {
        **{"create": NEW | create, "describe": {*ONE, "--format"}, "delete": {*ONE, "--async"} | delete},
        **{"ssh": {*WORKERS, "--command"} | workers, "scp": {*WORKERS, "--recurse"} | workers},
    }


FLAGS = {
    "tpu-vm": verbs({"--version"}, set(), set()),
    "queued-resources": verbs(NODES, {"--force"}, {"--node"}),
}
REQUIRED = {
    ("tpu-vm", "create"): {"--zone", "--version"},
    ("queued-resources", "create"): {"--zone", "--runtime-version", "--accelerator-type"},
}
CLOUD = Path(os.environ["CLOUD"])


def fail(message: str, code: int = 1) -> None:
    print(f"ERROR: (gcloud) {message}", file=sys.stderr)
    sys.exit(code)


def take(name: str) -> list[str] | int | None:
    """The first of what a file holds, which is then gone; the last stays."""
    path = CLOUD / name
    if not path.exists():
        return None
    first, *others = json.loads(path.read_text())
    path.write_text(json.dumps(others or [first]))
    return first


def on_workers(verb: str, words: list[str], flags: dict[str, str], home: Path) -> None:
    if verb == "scp":
        source, target = words
        shutil.copy(source, home / target.partition(":")[2])
        return
    command = ["bash", "-c", flags["--command"]]
    sys.exit(subprocess.run(command, cwd=home, env={**os.environ, "HOME": str(home)}).returncode)


def main(group: str, verb: str, *arguments: str) -> None:
    words = [word for word in arguments if not word.startswith("--")]
    flags = {word.partition("=")[0]: word.partition("=")[2] for word in arguments if word.startswith("--")}
    unknown = flags.keys() - FLAGS[group][verb]
    missing = REQUIRED.get((group, verb), {"--zone"}) - flags.keys()
    if unknown or missing:
        fail(f"unrecognized arguments: {sorted(unknown)}; missing: {sorted(missing)}", 2)
    name = words[-1 if verb == "scp" else 0].partition(":")[0]
    tpu, home = CLOUD / f"{name}.json", CLOUD / "homes" / name
    if tpu.exists() == (verb == "create"):
        fail("ALREADY_EXISTS" if verb == "create" else "NOT_FOUND")
    if verb == "create":
        tpu.write_text(json.dumps(take("creations.json")))
        if home.parent.exists():
            home.mkdir()
    elif verb == "describe":
        state = str(take(tpu.name))
        if state.startswith("error: "):
            fail(state)
        print(state)
    elif verb == "delete":
        tpu.unlink()
        shutil.rmtree(home, ignore_errors=True)
    elif home.parent.exists():
        on_workers(verb, words, flags, home)
    elif verb == "ssh":
        sys.exit(int(str(take("answers.json") or 0)))


if __name__ == "__main__":
    with Path(os.environ["RECORD"]).open("a") as record:
        record.write(json.dumps(sys.argv[1:]) + "\n")
    if sys.argv[1:4] != ["gcloud", "compute", "tpus"] or sys.argv[5] not in FLAGS.get(sys.argv[4], {}):
        fail(f"Invalid choice: {sys.argv[2:]}", 2)
    main(*sys.argv[4:])
