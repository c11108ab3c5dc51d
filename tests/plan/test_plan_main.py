"""`python -m portable_fsdp.plan`, as people start it, on a model that plans in seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from portable_fsdp.plan.__main__ import main

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


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`plan("--on=h100:8")` -> exit code, stdout, stderr."""
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))

    def run(*words: str) -> tuple[int, str, str]:
        code = main([f"--config={path}", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def planned(plan: Callable[..., tuple[int, str, str]], *words: str) -> dict[str, Any]:
    code, out, err = plan("--json", *words)
    assert code == 0, err
    return json.loads(out)


def test_a_plan_on_gpus_beside_a_run(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    rows = [
        {"step": step, "seconds": 2.0 if step > 3 else 9.0, "tokens": 16 * 128, "mfu": 0.25} for step in range(1, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = planned(plan, "--on=h100:8", f"--compare={tmp_path}")
    assert (found["schema_version"], found["devices"], found["backend"]) == (1, 8, "native")
    assert found["parameters"] == PARAMETERS
    parts = found["memory"]["parts"]
    assert parts["weights"] == pytest.approx(4 * PARAMETERS / 8, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * PARAMETERS / 8, rel=0.01)
    assert found["memory"]["peak_bytes"] == sum(parts.values())
    assert found["memory"]["verdict"] == "fits"
    assert found["time"]["seconds"] == max(found["time"]["bounds"].values())
    assert found["settings"]["train.micro_batch"] == 1
    assert found["measured"]["seconds"] == 2.0
    assert found["measured"]["ratio"] > 100


def test_a_plan_of_a_config_json_alone(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL["model"]["architecture"]))
    assert planned(plan, "--on=h100:8", f"model.architecture={tmp_path}")["parameters"] == PARAMETERS


@pytest.mark.proof
def test_what_a_reader_may_take_wrong_is_noted(plan: Callable[..., tuple[int, str, str]]) -> None:
    """Four experts over eight shards; and a host of L4s, of whose network nothing is known."""
    experts = ["model.architecture.model_type=mixtral", "model.architecture.num_local_experts=4"]
    (note,) = planned(plan, "--on=h100:8", *experts)["notes"]
    assert "% of the weights have fewer rows than the 8 shards" in note
    assert planned(plan, "--on=h100:4", "train.global_batch=16", *experts)["notes"] == []
    (note,) = planned(plan, "--on=l4:16")["notes"]
    assert note.startswith("no bandwidth of network is known")


@pytest.mark.xla
def test_a_plan_on_a_tpu_slice(plan: Callable[..., tuple[int, str, str]]) -> None:
    found = planned(plan, "--on=v6e-8")
    parts = found["memory"]["parts"]
    assert parts["weights"] + parts["optimizer"] == pytest.approx(12 * PARAMETERS / 8, rel=0.01)
    assert "libtpu" in found["method"]
    assert found["memory"]["limit_bytes"] == 31.25 * 2**30
    assert found["notes"] == []


def test_a_plan_for_people(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = plan("--on=cpu:2", f"--save={tmp_path / 'plan.png'}")
    assert code == 0, err
    assert "2 processes on the CPU" in out
    assert "memory of the fullest device" in out
    assert "time of a step: no bound" in out
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_a_sweep(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = plan("--on=h100:2", "--over=train.micro_batch=2,3", "--over=sharding.strategy=NO_SHARD,FULL_SHARD")
    assert code == 0, err
    rows = [line.split()[:2] for line in out.splitlines()[1:] if "fits" in line]
    assert sorted(rows) == sorted([size, how] for size in "2" for how in ("NO_SHARD", "FULL_SHARD"))
    refused = out.partition("refused:\n")[2].splitlines()
    assert [row.split() for row in refused[:2]] == [
        ["train.micro_batch=3", f"sharding.strategy={how}"] for how in ("NO_SHARD", "FULL_SHARD")
    ]
    assert refused[2].startswith("train.global_batch: expected a multiple")  # 16 rows are none of 3 x 2, said once
    assert "4 of at most 4: train.micro_batch=3 sharding.strategy=FULL_SHARD: refused" in err


@pytest.mark.proof
def test_a_sweep_for_programs(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = plan("--on=h100:2", "--over=train.micro_batch=2,3", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["schema_version"], found["complete"], found["left_out"]) == (1, True, [])
    assert [one["plan"] is None for one in found["plans"]] == [False, True]


def test_a_sweep_of_which_all_is_refused_is_a_mistake(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = plan("--on=h100:2", "--over=train.micro_batch=3,5")
    assert code == 2
    assert "expected a multiple" in out


def test_a_picture_where_a_folder_is(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "plan.png").mkdir()
    code, out, err = plan("--on=h100:8", f"--save={tmp_path / 'plan.png'}")
    assert (code, out) == (2, "")
    assert "found a folder" in err


@pytest.mark.proof
def test_a_picture_that_can_not_be_written(plan: Callable[..., tuple[int, str, str]]) -> None:
    """For a user like root it shows only in the attempt."""
    code, _, err = plan("--on=cpu:2", "--save=/proc/plan.png")
    assert code == 2
    assert "--save=/proc/plan.png: expected" in err


@pytest.mark.parametrize(
    "row",
    [{"mfu": "x"}, {"tokens": [1]}, {"tokens": None}, {"seconds": True}, {"seconds": float("nan")}, {"tokens": 7}],
)
def test_rows_that_are_no_runs_are_refused_before_the_plan(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path, row: dict[str, Any]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"seconds": 1.0, "tokens": 16 * 128, "mfu": None, **row}) + "\n")
    code, out, err = plan("--on=h100:8", f"--compare={tmp_path}")
    assert (code, out) == (2, "")
    assert "--compare: expected" in err
    assert "running" not in err


def test_what_does_not_fit_comes_with_what_would(plan: Callable[..., tuple[int, str, str]]) -> None:
    """Two GPUs of 22 GiB."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    wide = [f"model.architecture.{key}={value}" for key, value in sizes.items()]
    code, out, err = plan("--on=l4:2", *wide, "data.seq_len=2048", "train.micro_batch=8")
    assert code == 0, err
    assert "does not fit" in out
    assert "It fits with memory.gradient_checkpointing=full" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected --config=FILE and --on=WHERE"),
        (["--on=v6e-7"], "expected a v6e slice that is sold"),
        (["--on=h1000:8"], "nearest"),
        (["--on=h100:3"], "train.global_batch: expected a multiple"),
        (["--on=h100:8", "train.micro_batch=3"], "train.global_batch: expected a multiple"),
        (["--on=h100:8", "train.mikro_batch=3"], "micro_batch"),
        (["--on=h100:8", "--save=plan.txt"], "expected a file that ends in"),
        (["--on=h100:8", "--save=absent/plan.png"], "expected a folder that exists"),
        (["--on=h100:8", "--compare=absent"], "found no metrics.jsonl"),
        (["--on=h100:8", "--compare=absent", "--sweep"], "expected one plan"),
        (["--on=h100:8", "--over=micro_batch"], "expected a key with values"),
        (["--on=h100:8", "--over=train.micro_batch=1,,2"], "expected a key with values"),
        (["--on=h100:8", "--over=train.mikro_batch=1"], "micro_batch"),
        (["--on=h100:8", "--over=train.micro_batch=a,b"], "train.micro_batch"),
        (["--on=h100:8", "--no_such_flag"], "unknown flag --no_such_flag"),
        (["--on=v6e-8", "memory.cpu_offload=true"], "cpu_offload=true on XLA"),
    ],
)
def test_bad_input(plan: Callable[..., tuple[int, str, str]], words: Sequence[str], message: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


GPUS, SLICE = ("--on=h100:8", "running a step on fake tensors"), ("--on=v6e-8", "compiling micro_batch and update")


@pytest.mark.parametrize(
    ("where", "processes", "later_s"),
    [
        *((GPUS, 1, 0), (GPUS, 2, 0), (GPUS, 2, 0.3), (GPUS, 2, 4)),  # while it begins, imports, plans
        pytest.param(SLICE, 2, 3, marks=[pytest.mark.xla, pytest.mark.proof]),  # two compilers
    ],
)
def test_the_first_line_comes_at_once_and_ctrl_c_leaves_no_child(
    tmp_path: Path, where: tuple[str, str], processes: int, later_s: float
) -> None:
    process = _started(tmp_path, *where)
    assert process.stderr is not None
    children = _end(process, signal.SIGINT, processes, later_s)
    assert process.wait(60) == 130
    assert process.stderr.read() == "interrupted\n"
    process.stderr.close()
    # multiprocessing's resource tracker ends when it sees that its parent has.
    assert psutil.wait_procs(children, timeout=30)[1] == []


@pytest.mark.parametrize(
    ("where", "how"),
    [
        (GPUS, signal.SIGTERM),
        pytest.param(GPUS, signal.SIGKILL, marks=pytest.mark.proof),
        pytest.param(SLICE, signal.SIGTERM, marks=[pytest.mark.xla, pytest.mark.proof]),
        pytest.param(SLICE, signal.SIGKILL, marks=pytest.mark.xla),
    ],
    ids=["gpus-term", "gpus-kill", "slice-term", "slice-kill"],
)
def test_a_plan_that_is_killed_leaves_no_child(tmp_path: Path, where: tuple[str, str], how: signal.Signals) -> None:
    process = _started(tmp_path, *where)
    assert process.stderr is not None
    children = _end(process, how, 2, 2)
    assert process.wait(60) == (128 + how if how == signal.SIGTERM else -how)
    process.stderr.close()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert how == signal.SIGKILL or list((tmp_path / "tmp").iterdir()) == []


def _started(folder: Path, on: str, stage: str) -> subprocess.Popen[str]:
    """A plan that takes long, once it has said `stage`."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    (folder / "tmp").mkdir()
    command = [sys.executable, "-m", "portable_fsdp.plan", f"--config={path}", on]
    command += ["model.architecture.num_hidden_layers=40"]  # it is not to end before it is ended
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder / "tmp")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    began = time.monotonic()
    assert process.stderr is not None
    said = process.stderr.readline()
    assert time.monotonic() - began < 10
    while said != f"{stage}\n":
        said = process.stderr.readline()
        assert said, "it ended"
    return process


def _end(process: subprocess.Popen[str], how: signal.Signals, processes: int, later_s: float) -> list[psutil.Process]:
    """Send the signal to the plan alone, once it has so many children; returns these."""
    while len(children := psutil.Process(process.pid).children(recursive=True)) < processes:
        time.sleep(0.01)
    time.sleep(later_s)
    os.kill(process.pid, how)
    return children


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from portable_fsdp.plan.__main__ import main; main(['--help']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--on" in done.stdout
