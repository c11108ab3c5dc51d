"""TPU workers from a desk: what reaches them, what nobody may read, and what is refused before anything costs money.

gcloud is a program of the tests; its workers are folders.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli import ROOT, TINY, Started, finish, tiny_config
from hub_server import Hub, serve
from test_templates import program

MARK = str(7**30)  # in no file of the checkout
SECRET = f"hf_{MARK} $(id) 'quoted'"
GCLOUD = """
printf '%q ' "$@" >> "$FOLDER/argv"
echo >> "$FOLDER/argv"
grep -alf "$FOLDER/secret" /proc/[0-9]*/cmdline >> "$FOLDER/seen" 2> /dev/null
case "$*" in
*" create "*) touch "$FOLDER/created" ;;
*" delete "*) rm "$FOLDER/created" ;;
*" describe "*)
    [[ -e $FOLDER/created ]] || { echo NOT_FOUND >&2; exit 1; }
    [[ $* == *networkEndpoints* ]] && printf '"ipAddress": "10.0.0.%s",\\n' 1 2 || echo "$STATE"
    ;;
*" scp "*)
    [[ ! -e $FOLDER/broken ]] || exit 1
    for worker in 0 1; do mkdir -p "$FOLDER/worker$worker" && cp "$5" "$FOLDER/worker$worker/${6#*:}"; done
    ;;
*" ssh "*)
    for word in "$@"; do
        case $word in
        --worker=*) workers=${word#*=} ;;
        --command=*) command=${word#*=} ;;
        esac
    done
    [[ $workers != all ]] || workers="0 1"
    for worker in $workers; do
        mkdir -p "$FOLDER/worker$worker" && cd "$FOLDER/worker$worker" || exit
        env -u HF_TOKEN -u XLA_FLAGS bash -c "$command" || exit
    done
    ;;
esac
"""
# In place of `python3.11 -m venv .venv`: a pip and a uv that do nothing, and a run that writes down what it got.
VENV = r"""
mkdir -p .venv/bin
printf '#!/bin/bash\necho "$@" >> installed' > .venv/bin/uv
printf '#!/bin/bash\n[[ $2 == pip ]] || { printf %%s "$HF_TOKEN" > token; cat "${4#*=}" > config; }' > .venv/bin/python
chmod +x .venv/bin/uv .venv/bin/python
"""


class Desk:
    """A folder of the caller's, outside the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {"gcloud": GCLOUD, "python3.11": VENV, "sudo": "", "curl": "exit 22"}.items():
            program(folder / "bin", name, text)
        (folder / "secret").write_text(MARK)
        self.variables = {
            **{"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "FOLDER": str(folder), "HOME": str(folder), "STATE": "READY"},
            **{"TPU_NAME": "slice", "TPU_ZONE": "z", "TPU_TYPE": "v6e-8", "TPU_TRIES": "1", "TPU_POLL_S": "0"},
            **{"TPU_PYTHON": sys.executable, "HF_TOKEN": SECRET},
        }

    def run(self, *words: str, code: int, script: str = "tpu_vm", **more: str) -> Started:
        command = ["bash", str(ROOT / f"launch/{script}.sh"), "run", f"--config={tiny_config(self.folder)}", *words]
        return finish(command, self.folder, code, **self.variables | more)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path)
    for copy in (ROOT / "build/configs").glob("*-tiny.yaml"):
        copy.unlink()


@pytest.mark.slow
def test_variables_reach_each_worker_and_no_argument_log_or_history(desk: Desk) -> None:
    flags = ["train.global_batch=8", "--env=HF_TOKEN", "--", "--network=mine", "--internal-ip"]
    done = desk.run(*flags, code=0, TPU_EXTRA="tpu,data", XLA_FLAGS="--mine")
    assert "TPU_NAME=slice TPU_ZONE=z" in done.err  # what still costs
    for worker in (desk.folder / "worker0/portable_fsdp", desk.folder / "worker1/portable_fsdp"):
        handed = worker / "build/env"
        assert (worker / "token").read_text() == SECRET
        assert handed.stat().st_mode & 0o777 == 0o600
        assert "XLA_FLAGS" not in handed.read_text()
        assert yaml.safe_load((worker / "config").read_text()) == TINY  # from outside the checkout
        assert "--torch-backend=cpu --editable .[tpu,data] gcsfs" in (worker / "installed").read_text()
    files = {path.relative_to(desk.folder): path for path in desk.folder.rglob("*") if path.is_file()}
    having = {str(name) for name, path in files.items() if MARK in path.read_text(errors="replace")}
    wanted = {f"worker{n}/portable_fsdp/{name}" for n in (0, 1) for name in ("token", "build/env")}
    assert having == {"secret", *wanted}  # no log, no history
    assert (desk.folder / "seen").read_text() == ""  # no process's arguments
    # The same command again installs nothing; without --env the file goes.
    desk.run("train.global_batch=8", code=0, TPU_EXTRA="tpu,data")
    for worker in (desk.folder / "worker0/portable_fsdp", desk.folder / "worker1/portable_fsdp"):
        assert (worker / "installed").read_text().count("\n") == 1
        assert not (worker / "build/env").exists()
        assert (worker / "token").read_text() == ""
    for line in (desk.folder / "argv").read_text().splitlines()[:10]:
        assert ("--network=mine" in line) == (" create " in line), line
        assert ("--internal-ip" in line) == bool(re.search(" ssh | scp ", line)), line


@pytest.mark.slow
def test_variables_reach_the_workers_of_each_slice(desk: Desk) -> None:
    more = {"script": "tpu_queued_resource", "STATE": "ACTIVE", "TPU_SLICES": "2"}
    done = desk.run("train.global_batch=16", "--env=HF_TOKEN", code=0, **more)
    argv = (desk.folder / "argv").read_text()
    assert "tpu-vm describe slice-node-0 --zone=z" in argv
    assert re.findall(r"--node=(\d) --worker=(\d)", argv) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert (desk.folder / "worker1/portable_fsdp/token").read_text() == SECRET
    assert not (desk.folder / "created").exists()
    assert "until you delete it" not in done.err


def test_a_failed_start_names_what_still_costs(desk: Desk) -> None:
    (desk.folder / "broken").touch()
    done = desk.run("train.global_batch=8", code=1)
    assert "slice in z (READY) is still there, and costs money until you delete it:" in done.err
    [command] = re.findall(r"^  (TPU_NAME=.* delete)$", done.err, re.MULTILINE)
    finish(["bash", "-c", command], desk.folder, **desk.variables)
    assert not (desk.folder / "created").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.step=1"], "train.step: unknown key"),
        (["sharding.tensor=3"], "8 device(s) of 1 host(s)"),  # of v6e-8
        (["data.source=parquet", "data.path=x"], "data.source=parquet needs the extra data: set TPU_EXTRA=tpu,data."),
        (["data.mixture=[{source: parquet, path: x}]"], "data.source=parquet needs the extra data"),
        (["model.pretrained=org/open", "model.lora={r: 4}"], "model.lora needs the extra lora"),
        (["observe.trackers=[wandb]"], "set TPU_PACKAGES='gcsfs wandb'."),
        (["model.pretrained=org/gated"], "org/gated is gated: accept its license and add --env=HF_TOKEN."),
        (["model.pretrained=org/gated", "--env=HF_TOKEN"], "org/gated is gated: your HF_TOKEN has no access to it."),
        (["model.pretrained=org/none"], "org/none isn't public, or doesn't exist"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_a_mistake_is_said_before_anything_is_created(words: list[str], sentence: str, desk: Desk) -> None:
    model = ["model.architecture=null"] if words[0].startswith("model.") else []
    with serve(Hub({"org/gated": desk.folder, "org/open": desk.folder}, gated={"org/gated"})) as hub:
        token = {"HF_TOKEN": "hf_plain", "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = desk.run("train.global_batch=8", *model, *words, code=2, **token)
    assert sentence in done.err
    assert not (desk.folder / "argv").exists()  # gcloud was never called
