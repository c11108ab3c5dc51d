"""`python -m portable_fsdp.plan`, as people start it, on a model that plans in seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from steps import T5

from portable_fsdp.plan.__main__ import main
from portable_fsdp.runtime.child import Worker

pytestmark = pytest.mark.slow

SMALL = {
    "model": {
        "architecture": {
            **{"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        }
    },
    "data": {"seq_len": 128},
    "train": {"steps": 1, "global_batch": 16},
    "precision": {"compute": "bfloat16"},
}
PARAMETERS = 2 * 1024 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256) + 256
Planner = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def shared_worker(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portable_fsdp.plan.__main__.Worker", lambda: nullcontext(worker))


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planner:
    """`plan("--on=h100:8")` -> exit code, stdout, stderr."""
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))

    def run(*words: str) -> tuple[int, str, str]:
        code = main([f"--config={path}", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def planned(plan: Planner, *words: str) -> dict[str, Any]:
    code, out, err = plan("--json", *words)
    assert code == 0, err
    return json.loads(out)


def test_a_plan_on_gpus_of_a_config_json_beside_a_run(plan: Planner, tmp_path: Path) -> None:
    rows = [
        {"step": step, "seconds": 2.0 if step > 3 else 9.0, "tokens": 16 * 128, "mfu": 0.25} for step in range(1, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text(json.dumps(SMALL["model"]["architecture"]))
    result = planned(plan, "--on=h100:8", f"--compare={tmp_path}", f"model.architecture={tmp_path}")
    assert (result["schema_version"], result["devices"], result["backend"]) == (1, 8, "native")
    assert result["parameters"] == PARAMETERS
    memory, measured = result["memory"], result["measured"]
    assert memory["parts"]["weights"] == pytest.approx(4 * PARAMETERS / 8, rel=0.01)
    assert memory["parts"]["optimizer"] == pytest.approx(8 * PARAMETERS / 8, rel=0.01)
    assert (memory["peak_bytes"], memory["verdict"]) == (sum(memory["parts"].values()), "fits")
    assert result["settings"]["train.micro_batch"] == 1
    assert measured == {"steps": 14, "seconds": 2.0, "tokens_per_second": 16 * 128 / 2, "mfu": 0.25}
    _, text, _ = plan("--on=h100:8", f"--compare={tmp_path}")
    titles, seconds, *_, mfu = text.splitlines()[-4:]
    assert titles.split() == ["planned", "measured", "in", "14", "steps"]
    assert seconds.split() == ["s", "a", "step", f"{result['expected']['seconds']:.4g}", "2"]
    assert mfu.split() == ["mfu", f"{result['expected_mfu']:.1%}", "25.0%"]


def of_rows(folder: Path, task: str, rows: str, model: dict[str, Any]) -> str:
    """The flag of a config for rows of backends/planned_rows.py."""
    sections = {"train": {"steps": 1, "task": task, "global_batch": 16}, "model": model}
    sections["data"] = {"factory": f"planned_rows:{rows}", "eval_split": "test"}
    (folder / "rows.yaml").write_text(yaml.safe_dump(SMALL | sections))
    return f"--config={folder / 'rows.yaml'}"


def test_rows_of_a_factory_are_planned_like_its_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flag = of_rows(tmp_path, "image_classification", "images", {"factory": "planned_rows:model"})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"seconds": 1.0, "tokens": 16, "mfu": None}) + "\n")
    assert main([flag, "--on=h100:2", "--json", f"--compare={tmp_path}"]) == 0
    result = json.loads(capsys.readouterr().out)
    width, blocks, size = 128, 6, 16 * 16  # of planned_rows.Pictures
    products = blocks * size * width * 9 * width + size * 48 * width + width * 10  # of an image
    parameters = 48 * width + width + blocks * (9 * width**2 + 3 * width) + 10 * width + 10
    assert result["parameters"] == parameters
    assert result["memory"]["parts"]["weights"] == pytest.approx(4 * parameters / 2, rel=0.05)
    assert result["memory"]["parts"]["optimizer"] == pytest.approx(8 * parameters / 2, rel=0.05)
    assert result["work"]["matmul_flops"]["bfloat16"] == pytest.approx(8 * 3 * 2 * products, rel=0.02)  # 8 rows each
    assert result["tokens_per_step"] == 16
    assert result["model_flops_per_device"] == pytest.approx(8 * 3 * 2 * products, rel=0.02)
    assert (result["measured"]["seconds"], "data.seq_len" in result["settings"]) == (1.0, False)
    [note] = result["notes"]
    assert "pixel_values float32 [3, 64, 64], labels int64 []; each counts as one token." in note
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"seconds": 1.0, "tokens": 17, "mfu": None}) + "\n")
    assert main([flag, "--on=h100:2", f"--compare={tmp_path}"]) == 2
    assert "expected a run with 16 tokens per step" in capsys.readouterr().err


@pytest.mark.proof
@pytest.mark.parametrize("where", ["--on=h100:2", pytest.param("--on=v6e-4", marks=pytest.mark.xla)])
def test_a_t5_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str) -> None:
    assert main([of_rows(tmp_path, "seq2seq_lm", "pairs", {"architecture": T5}), where, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rest = result["memory"]["parts"]["weights"] + result["memory"]["parts"]["optimizer"]
    assert rest * result["devices"] == pytest.approx(12 * result["parameters"], rel=0.05)
    assert result["tokens_per_step"] == 16 * 256
    assert 0.9 < result["model_flops_per_device"] / sum(result["work"]["matmul_flops"].values()) < 1.2


def test_a_factory_without_its_data_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for where in ("--on=h100:2", "--on=v6e-4"):
        flag = of_rows(tmp_path, "image_classification", "absent", {"factory": "planned_rows:model"})
        assert main([flag, where]) == 2
        error = capsys.readouterr().err
        assert "data.factory: planned_rows:absent can't be imported" in error
        assert "Traceback" not in error


@pytest.mark.proof
def test_what_a_reader_may_take_wrong_is_noted(plan: Planner) -> None:
    """GPUs whose shares of the peak nobody published, those that take a neighbour's, and a slice under TorchTPU."""
    notes = {
        "--on=l4:16": "time of a step: unknown, since no published run shows what NVIDIA L4 reaches",
        "--on=h200:8": ", by shares of the peak that are h100's: no published run that a plan can express",
        "--on=v6e-8 --backend=native": "time of a step: unknown, since on TPUs only a plan of xla has one",
    }
    for words, note in notes.items():
        _, text, _ = plan(*words.split())
        assert note in text


@pytest.mark.xla
def test_a_plan_on_a_tpu_slice(plan: Planner) -> None:
    result = planned(plan, "--on=v6e-8")
    memory, work = result["memory"], result["work"]
    assert memory["parts"].keys() >= {"weights", "gradients", "optimizer", "batch", "temporaries"}
    bytes_each = {"weights": 4, "optimizer": 8, "gradients": 4}  # AdamW's state, though micro_batch doesn't take it
    for part, size in bytes_each.items():
        assert memory["parts"][part] == pytest.approx(size * PARAMETERS / 8, rel=0.05), part
    assert (memory["limit_bytes"], memory["verdict"], result["notes"]) == (31.25 * 2**30, "fits", [])
    assert " in " in memory["at"]
    assert ("exp_avg/lm_head.weight", 4 * 1024 * 256 // 8) in [(b["name"], b["bytes"]) for b in memory["biggest"]]
    assert work["matmul_flops"]["bfloat16"] > 2 * 6 * 128 * (PARAMETERS - 1024 * 256)  # two rows; attention besides
    assert work["sent_bytes"].keys() == {"ici"}
    assert work["sent_bytes"]["ici"] > 2 * 2 * PARAMETERS
    assert "compiled by libtpu " in result["method"]
    assert sum(result["expected"]["parts"].values()) == pytest.approx(result["expected"]["seconds"])


def test_a_sweep(plan: Planner) -> None:
    code, out, err = plan("--on=h100:2", "--over=train.micro_batch=2,9", "--over=sharding.strategy=NO_SHARD,FULL_SHARD")
    assert code == 0, err
    rows = [line.split()[:2] for line in out.splitlines()[1:] if "fits" in line]
    assert sorted(rows) == sorted([size, how] for size in "2" for how in ("NO_SHARD", "FULL_SHARD"))
    refused = out.partition("refused:\n")[2].splitlines()
    assert [row.split() for row in refused[:2]] == [
        ["train.micro_batch=9", f"sharding.strategy={how}"] for how in ("NO_SHARD", "FULL_SHARD")
    ]
    assert refused[2].startswith("train.micro_batch: expected at most 8")  # of 16 rows on two devices, said once
    assert "4 of at most 4: train.micro_batch=9 sharding.strategy=FULL_SHARD: refused" in err
    code, out, _ = plan("--on=h100:2", "--over=train.micro_batch=9,10", "--json")
    result = json.loads(out)
    assert (code, result["schema_version"], result["complete"], result["left_out"]) == (2, 1, True, [])
    assert ["expected at most 8" in tried["refusal"] for tried in result["plans"]] == [True, True]


def test_each_point_has_the_values_that_auto_takes_there(plan: Planner) -> None:
    words = ("memory.gradient_checkpointing=auto", "memory.save_ops=[]", "train.micro_batch=auto")
    where = ("--on=NVIDIA H100 80GB HBM3:2", "--memory=2.08", *words)
    for tried in planned(plan, *where, "--over=data.seq_len=32,64")["plans"]:
        one = planned(plan, *where, f"data.seq_len={tried['settings']['data.seq_len']}")
        assert one["memory"]["limit_bytes"] == int(2.08 * 2**30) - 2**29
        assert one["chosen"].items() <= tried["settings"].items()
        assert one["memory"] == tried["plan"]["memory"]


def test_what_does_not_fit_comes_with_what_would(plan: Planner) -> None:
    """Two GPUs of 22 GiB."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    words = [f"model.architecture.{key}={value}" for key, value in sizes.items()]
    words += ["data.seq_len=2048", "train.micro_batch=8", "memory.save_ops=[]", "precision.matmul=high"]
    code, out, err = plan("--on=l4:2", *words)
    assert code == 0, err
    header = out.splitlines()[1]
    assert header.endswith("compile.scan_layers=false, precision.compute=bfloat16, precision.matmul=high")
    for text in ("memory of the fullest device", "does not fit", "It fits with memory.gradient_checkpointing=full"):
        assert text in out


def test_a_group_of_another_dtype_in_the_root_is_gathered_once_a_micro_batch(plan: Planner) -> None:
    """Like the root, which backward begins with."""
    result = planned(plan, "--on=h100:8", "train.micro_batch=1", "precision.modules={model.norm: float32}")
    assert result["work"]["collectives"]["all_gather float32"]["calls"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--config=FILE and --on=WHERE are required"),
        ("--on=h100:3 model.router_bias_rate=0.1", "train.global_batch: expected a multiple"),
        ("--on=h100:8 train.micro_batch=3", "train.micro_batch: expected at most 2"),
        ("--on=h100:8 train.mikro_batch=3", "micro_batch"),
        ("--on=h100:8 --compare=absent", "--compare=absent: no metrics.jsonl"),
        ("--on=h100:8 --compare=runs --over=train.micro_batch=1,2", "needs a single plan"),
        ("--on=h100:8 --over=data.seq_len=8 --over=data.seq_len=16", "data.seq_len has values already"),
        ("--on=h100:3 train.micro_batch=auto model.router_bias_rate=0.1", "train.global_batch: expected a multiple"),
        ("--on=h100:8 train.micro_batch=auto --memory=-1", "expected a number of at least 0"),
        ("--on=h100:8 --over=micro_batch", "expected a key with values"),
        ("--on=h100:8 --over=train.micro_batch=1,,2", "expected a key with values"),
        ("--on=h100:8 --over=train.mikro_batch=1", "micro_batch"),
        ("--on=h100:8 --over=train.micro_batch=a,b", "train.micro_batch"),
        ("--on=h100:8 --no_such_flag", "unknown flag --no_such_flag"),
        ("--on=v6e-8 memory.cpu_offload=true", "cpu_offload=true on XLA"),
        ("--on=v6e-8 precision.products=int8", "products=int8 on TPU v4 and v6e"),
        ("--on=h100:8 --over=memory.save_ops=[matmul,attention],[nothing]", "save_ops=[nothing]"),
    ],
)
def test_bad_input(plan: Planner, words: str, message: str) -> None:
    code, out, err = plan(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


GPUS, SLICE = ("--on=h100:8", "running a step on fake tensors"), ("--on=v6e-8", "compiling micro_batch and update")
PROOF, XLA = pytest.mark.proof, pytest.mark.xla


@pytest.mark.parametrize(
    ("where", "how", "processes", "later_s"),
    [
        (GPUS, signal.SIGINT, 1, 0),  # while it begins
        (GPUS, signal.SIGINT, 1, 4),  # while it plans
        pytest.param(GPUS, signal.SIGINT, 1, 0.3, marks=PROOF),  # while it imports
        pytest.param(SLICE, signal.SIGINT, 2, 3, marks=[XLA, PROOF]),  # two compilers
        (GPUS, signal.SIGTERM, 1, 2),
        pytest.param(GPUS, signal.SIGKILL, 1, 2, marks=PROOF),
        pytest.param(SLICE, signal.SIGTERM, 2, 2, marks=[XLA, PROOF]),
        pytest.param(SLICE, signal.SIGKILL, 2, 2, marks=[XLA, PROOF]),
    ],
)
def test_the_first_line_comes_at_once_and_a_plan_that_is_ended_leaves_no_child(
    tmp_path: Path, where: tuple[str, str], how: signal.Signals, processes: int, later_s: float
) -> None:
    process = _started(tmp_path, *where)
    assert process.stderr is not None
    while len(children := psutil.Process(process.pid).children(recursive=True)) < processes:
        time.sleep(0.01)
    time.sleep(later_s)
    os.kill(process.pid, how)  # the plan alone
    assert process.wait(60) == (-how if how == signal.SIGKILL else 128 + how)
    if how == signal.SIGINT:
        assert process.stderr.read() == "interrupted\n"
    process.stderr.close()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert how != signal.SIGTERM or list((tmp_path / "tmp").iterdir()) == []


def _started(folder: Path, on: str, stage: str) -> subprocess.Popen[str]:
    """A plan that takes long, once it has said `stage`."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    (folder / "tmp").mkdir()
    # A shell's background job ignores SIGINT, and so would its children.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heed, sys.executable, "-m", "portable_fsdp.plan", f"--config={path}", on]
    command += ["model.architecture.num_hidden_layers=40"]  # it is not to end before it is ended
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    began = time.monotonic()
    assert process.stderr is not None
    line = process.stderr.readline()
    assert time.monotonic() - began < 10
    while line != f"{stage}\n":
        line = process.stderr.readline()
        assert line, "it ended"
    return process
