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


def test_a_plan_on_gpus(plan: Callable[..., tuple[int, str, str]]) -> None:
    found = planned(plan, "--on=h100:8")
    assert (found["schema_version"], found["devices"], found["backend"]) == (1, 8, "native")
    assert found["parameters"] == PARAMETERS
    parts = found["memory"]["parts"]
    assert parts["weights"] == pytest.approx(4 * PARAMETERS / 8, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * PARAMETERS / 8, rel=0.01)
    assert found["memory"]["peak_bytes"] == sum(parts.values())
    assert found["memory"]["verdict"] == "fits"
    assert found["time"]["seconds"] == max(found["time"]["bounds"].values())
    assert found["settings"]["train.micro_batch"] == 1


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
    assert out.count("refused: train.micro_batch=3") == 2  # 16 rows are no multiple of 3 x 2


def test_what_does_not_fit_comes_with_what_would(plan: Callable[..., tuple[int, str, str]]) -> None:
    """Two GPUs of 22 GiB."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    wide = [f"model.architecture.{key}={value}" for key, value in sizes.items()]
    code, out, err = plan("--on=l4:2", *wide, "data.seq_len=2048", "train.micro_batch=8")
    assert code == 0, err
    assert "does not fit" in out
    assert "It fits with memory.gradient_checkpointing=full" in out


def test_a_run_beside_its_plan(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    rows = [
        {"step": step, "seconds": 2.0 if step > 3 else 9.0, "tokens": 16 * 128, "mfu": 0.25} for step in range(1, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = planned(plan, "--on=h100:8", f"--compare={tmp_path}")["measured"]
    assert measured["seconds"] == 2.0
    assert measured["ratio"] > 100


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
        (["--on=h100:8", "--over=micro_batch"], "expected a key with values"),
        (["--on=h100:8", "--no_such_flag"], "Unknown command line flag"),
        (["--on=v6e-8", "memory.cpu_offload=true"], "cpu_offload=true on XLA"),
    ],
)
def test_bad_input(plan: Callable[..., tuple[int, str, str]], words: Sequence[str], message: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_the_first_line_comes_at_once_and_ctrl_c_leaves_no_child(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    command = [sys.executable, "-m", "portable_fsdp.plan", f"--config={path}", "--on=h100:8"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    began = time.monotonic()
    assert process.stderr is not None
    assert process.stderr.readline() == "running a step on fake tensors\n"
    assert time.monotonic() - began < 10
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    # multiprocessing's resource tracker ends when it sees that its parent has.
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from portable_fsdp.plan.__main__ import main; main(['--help']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--on" in done.stdout
