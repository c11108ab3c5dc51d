"""TPU workers from a desk: what reaches them, what nobody may read, and what is refused before anything costs money.

gcloud is a program of the tests; its workers are folders.
"""

import re
import shutil
import sys
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
*" create "*) [[ ! -e $FOLDER/mistyped ]] || exit 2; touch "$FOLDER/created" ;;
*" delete "*) rm "$FOLDER/created" ;;
*" describe "*)
    [[ -e $FOLDER/created ]] || { echo NOT_FOUND >&2; exit 1; }
    [[ $* != *networkEndpoints* || ! -e $FOLDER/alone ]] || exit 0
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
cat > .venv/bin/python << 'END'
#!/bin/bash
[[ $2 != pip ]] || exit 0
printf %s "$HF_TOKEN" > token
printf %s "$names" > names
cat "${4#*=}" > config
echo "$@" > words
END
chmod +x .venv/bin/uv .venv/bin/python
"""


class Desk:
    """A folder of the caller's, and a small checkout in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {"gcloud": GCLOUD, "python3.11": VENV, "sudo": "", "curl": "exit 22"}.items():
            program(folder / "bin", name, text)
        (folder / "secret").write_text(MARK)
        self.checkout = folder / "checkout"
        shutil.copytree(ROOT / "launch", self.checkout / "launch")
        (self.checkout / "portable_fsdp").symlink_to(ROOT / "portable_fsdp")
        (self.checkout / "pyproject.toml").touch()
        self.variables = {
            **{"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "FOLDER": str(folder), "HOME": str(folder), "STATE": "READY"},
            **{"TPU_NAME": "slice", "TPU_ZONE": "z", "TPU_TYPE": "v6e-8", "TPU_TRIES": "1", "TPU_POLL_S": "0"},
            **{"TPU_PYTHON": sys.executable, "HF_TOKEN": SECRET},
        }

    def run(self, *words: str, code: int, script: str = "tpu_vm", **more: str) -> Started:
        config = () if words[0].startswith("--flagfile") else (f"--config={tiny_config(self.folder)}",)
        command = ["bash", str(self.checkout / f"launch/{script}.sh"), "run", *config, *words]
        return finish(command, self.folder, code, **self.variables | more)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.slow
def test_variables_reach_each_worker_and_no_argument_log_or_history(desk: Desk) -> None:
    # `names` is a variable of the script too.
    flags = ["train.global_batch=8", "--env=HF_TOKEN,names", "--", "--network=mine", "--internal-ip"]
    flags.append("--access-token-file=a file")
    done = desk.run(*flags, code=0, TPU_EXTRA="tpu,data", XLA_FLAGS="--mine", names="a 'b'")
    assert "TPU_NAME=slice TPU_ZONE=z" in done.err  # what still costs
    for worker in (desk.folder / "worker0/portable_fsdp", desk.folder / "worker1/portable_fsdp"):
        handed = worker / "build/env"
        assert (worker / "token").read_text() == SECRET
        assert (worker / "names").read_text() == "a 'b'"
        assert handed.stat().st_mode & 0o777 == 0o600
        assert "XLA_FLAGS" not in handed.read_text()
        assert yaml.safe_load((worker / "config").read_text()) == TINY  # from outside the checkout
        assert "--torch-backend=cpu --editable .[tpu,data] gcsfs" in (worker / "installed").read_text()
    files = {path.relative_to(desk.folder): path for path in desk.folder.rglob("*") if path.is_file()}
    having = {str(name) for name, path in files.items() if MARK in path.read_text(errors="replace")}
    allowed = {f"worker{n}/portable_fsdp/{name}" for n in (0, 1) for name in ("token", "build/env")}
    assert having == {"secret", *allowed}  # no log, no history
    assert (desk.folder / "seen").read_text() == ""  # no process's arguments
    lines = (desk.folder / "argv").read_text().splitlines()
    # The same command again installs nothing; without --env the file goes.
    desk.run("train.global_batch=8", code=0, TPU_EXTRA="tpu,data")
    for worker in (desk.folder / "worker0/portable_fsdp", desk.folder / "worker1/portable_fsdp"):
        assert (worker / "installed").read_text().count("\n") == 1
        assert not (worker / "build/env").exists()
        assert (worker / "token").read_text() == ""
    for line in lines:
        assert ("--network=mine" in line) == (" create " in line), line
        assert r"--access-token-file=a\ file" in line
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


@pytest.mark.slow
def test_the_checked_files_run(desk: Desk) -> None:
    """A linked config of the checkout, and a file from elsewhere, that change after `setup`; a flag file names them."""
    configs, flags, worker = desk.checkout / "configs", desk.folder / "flags", desk.folder / "worker1/portable_fsdp"
    configs.mkdir()
    (configs / "link.yaml").symlink_to(desk.folder / "tiny.yaml")
    flags.write_text(f"# flags\n--config={configs}/link.yaml\n\n --import=more.yaml \ntrain.global_batch=8")
    for seed in (3, 4, 4):
        config, imported = TINY | {"run": {"dir": "run", "seed": seed}}, f"mixed_precision: bf16 # {seed}"
        (desk.folder / "tiny.yaml").write_text(yaml.safe_dump(config))
        (desk.folder / "more.yaml").write_text(imported)
        desk.run(f"--flagfile={flags}", code=0)
        [name] = re.findall(r"--config=configs/link.yaml --import=(\S+) ", (worker / "words").read_text())
        assert (yaml.safe_load((worker / "config").read_text()), (worker / name).read_text()) == (config, imported)
    assert (worker / "installed").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("fault", "words", "code", "sentence"),
    [
        ("broken", ["--", "--account=a b"], 1, "given up after 2 tries"),
        ("mistyped", ["--", "--netwrk=x"], 2, "gcloud takes no such `create`"),
        ("alone", ["--env=HF_TOKEN"], 1, "gcloud lists no workers of slice (networkEndpoints)"),
    ],
)
def test_a_failed_start_says_why_and_names_what_still_costs(
    fault: str, words: list[str], code: int, sentence: str, desk: Desk
) -> None:
    (desk.folder / fault).touch()
    done = desk.run("train.global_batch=8", *words, code=code, TPU_TRIES="2")
    assert sentence in done.err
    commands = re.findall(r"^  (TPU_NAME=.* delete.*)$", done.err, re.MULTILINE)
    assert len(commands) == (fault != "mistyped")
    for command in commands:
        assert "slice in z (READY) is still there, and costs money until you delete it:" in done.err
        finish(["bash", "-c", command], desk.folder, **desk.variables)
        deletes = re.findall(r" delete .*", (desk.folder / "argv").read_text())
        assert [r"--account=a\ b" in line for line in deletes] == [fault == "broken"]
    assert not (desk.folder / "created").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.step=1"], "train.step: unknown key"),
        (["sharding.tensor=3"], "8 device(s) of 1 host(s)"),  # of v6e-8
        (["data.source=parquet", "data.path=x"], "data.source=parquet needs the extra data: set TPU_EXTRA=tpu,data."),
        (["data.mixture=[{source: parquet, path: x}]"], "data.source=parquet needs the extra data"),
        (
            [
                "model.pretrained=org/open",
                "model.lora={start_from: org/gated}",
                "data.source=parquet",
                "data.path=gs://x",
            ],
            "data.source=parquet needs the extra data; model.lora needs the extra lora: set TPU_EXTRA=tpu,data,lora.\n"
            "model.lora.start_from: org/gated is gated",
        ),
        (
            [
                "--device=cpu",
                "checkpoint.dir=s3://x",
                "observe.trackers=[wandb,comet_ml]",
                "model.architecture=org/open",
            ],
            "--device=cpu: workers train on their TPU; leave it out.\n"
            "observe.trackers=wandb needs wandb; checkpoint.dir needs s3fs: "
            "set TPU_PACKAGES='gcsfs comet-ml wandb s3fs'.\n"
            "model.architecture=org/open: expected a file or folder of the checkout",
        ),
        (["--backend=native"], "--backend=native needs TPU_EXTRA=torchtpu"),
        (["model.pretrained=org/open", "--env=HF_TOKEN", "HF_TOKEN="], "HF_TOKEN is empty."),
        (["model.pretrained=org/open", "--env=HF_TOKEN", "HF_TOKEN=a b"], "HF_TOKEN has spaces or other characters"),
        (["model.pretrained=org/open", "--env=HF_TOKEN", "HF_TOKEN=hf_old"], "the hub rejects HF_TOKEN (401)"),
        (["model.pretrained=org/gated"], "org/gated is gated: accept its license and add --env=HF_TOKEN."),
        (["model.pretrained=org/gated", "--env=HF_TOKEN"], "org/gated is gated: your HF_TOKEN has no access to it."),
        (["model.pretrained=org/none"], "org/none isn't public, or doesn't exist"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_a_mistake_is_said_before_anything_is_created(words: list[str], sentence: str, desk: Desk) -> None:
    token = dict(word.split("=", 1) for word in words if word.startswith("HF_TOKEN="))
    model = ["model.architecture=null"] if words[0].startswith("model.pre") else []
    words = [word for word in words if not word.startswith("HF_TOKEN=")]
    repos = {"org/gated": desk.folder, "org/open": desk.folder}
    with serve(Hub(repos, gated={"org/gated"}, rejected={"hf_old"})) as hub:
        more = {"HF_TOKEN": "hf_plain", "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "TPU_PACKAGES": "gcsfs comet-ml"}
        done = desk.run("train.global_batch=8", *model, *words, code=2, **more | token)
    assert sentence in done.err
    assert not (desk.folder / "argv").exists()  # gcloud was never called
