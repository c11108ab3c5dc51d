"""Runs with `train.micro_batch: auto`: the number that a plan gives, on all processes, once and for a whole run."""

from pathlib import Path

import pytest
from cli import TORCHRUN, finish, launch, require_curve, tiny_config

from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.checkpoint.format import read_manifest
from portable_fsdp.convert.read import load_config
from portable_fsdp.runtime.errors import BackendError

pytestmark = pytest.mark.slow

AUTO = "train.micro_batch=auto"


@pytest.mark.proof
def test_processes_agree_on_the_largest_that_fits_and_a_resumed_run_keeps_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two devices, then one, which is planned anew; the curve is that of one row at a time."""
    config, run = f"--config={tiny_config(tmp_path)}", tmp_path / "run"
    two = finish([*TORCHRUN, "--device=cpu", config, AUTO, "train.stop_at=2"], tmp_path)
    assert two.err.count("train.micro_batch: 2, the largest that fits by plan") == 1
    assert load_config(run / "config.yaml").train.micro_batch == 2
    assert read_manifest(run / "checkpoints/step-00000002").config["train"]["micro_batch"] == 2
    one = ["--device=cpu", config, f"run.dir={run}", AUTO]
    assert launch(*one, "train.stop_at=4") == 0
    assert "train.micro_batch: 4, the largest that fits by plan" in capfd.readouterr().err
    assert launch(*one) == 0
    error = capfd.readouterr().err
    assert "train.micro_batch: 4, as before in this run" in error
    assert "planning" not in error
    require_curve(tmp_path, "--device=cpu", config, rel=1e-5)


def test_what_gives_no_number_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model of 68 billion parameters on this host; engines without a planner there."""
    path = tiny_config(tmp_path)
    large = ["hidden_size=65536", "vocab_size=1048576", "head_dim=16"]
    words = [f"run.dir={tmp_path / 'run'}", AUTO, "train.global_batch=1", *(f"model.architecture.{w}" for w in large)]
    assert launch("--device=cpu", f"--config={path}", *words) == 2
    error = capfd.readouterr().err
    for text in ("train.micro_batch=1: ", "GiB, does not fit", "or set train.micro_batch to a number"):
        assert text in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
    for engine, device in (("native", "tpu"), ("xla", "cpu"), ("xla_fsdp1", "tpu")):
        with pytest.raises(BackendError, match=f"backend {engine} on {device}: train.micro_batch=auto"):
            require_supported(load_config(path, [AUTO]), Deployment(engine, device))
