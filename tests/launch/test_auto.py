"""Runs with `auto`: the values that a plan gives, on all processes, once and for a whole run."""

from pathlib import Path

import pytest
from cli import TORCHRUN, events, finish, launch, require_curve, tiny_config

import portable_fsdp as pf
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.checkpoint.manifests import read_manifest
from portable_fsdp.config.describe import with_settings, without_plan
from portable_fsdp.convert.read import load_config
from portable_fsdp.runtime.errors import BackendError, ConfigError
from portable_fsdp.train.auto import resolve_auto

pytestmark = pytest.mark.slow

ROWS = "train.micro_batch=auto"
AUTO = [ROWS, "memory.gradient_checkpointing=auto", "compile.enabled=auto"]


@pytest.mark.proof
def test_processes_agree_on_the_fastest_that_fits_and_a_resumed_run_keeps_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two devices, then one, which is planned anew; the curve is that of one row at a time."""
    config, run = f"--config={tiny_config(tmp_path)}", tmp_path / "run"
    two = finish([*TORCHRUN, "--device=cpu", config, *AUTO, "train.stop_at=2"], tmp_path)
    words = "chosen: train.micro_batch={} memory.gradient_checkpointing=none compile.enabled=false"
    assert two.err.count(words.format(2)) == 1
    saved = load_config(run / "config.yaml")
    assert (saved.train.micro_batch, saved.memory.gradient_checkpointing) == ("auto", "auto")
    chosen = {"train.micro_batch": "2", "memory.gradient_checkpointing": "none", "compile.enabled": "false"}
    assert events(run, "start")[-1]["chosen"] == chosen
    assert read_manifest(run / "checkpoints/step-00000002").config["train"]["micro_batch"] == 2
    one = ["--device=cpu", config, f"run.dir={run}", *AUTO]
    assert launch(*one, "train.stop_at=4") == 0
    assert words.format(4) in capfd.readouterr().err
    assert launch(*one) == 0
    error = capfd.readouterr().err
    assert words.format(4) in error
    assert "auto: as before in this run" in error
    assert "planning" not in error
    require_curve(tmp_path, "--device=cpu", config, rel=1e-5)


def test_an_engine_without_a_plan_recomputes_all_layers(tmp_path: Path) -> None:
    """test_launch.py has a run on xla. Those without a planner refuse it for the batch."""
    path = tiny_config(tmp_path)
    config = load_config(path, AUTO[1:])
    with pytest.raises(ConfigError, match=r"memory\.gradient_checkpointing: expected a value, found auto"):
        pf.open_backend(config, device="cpu", backend="native")
    with pf.open_backend(without_plan(config), device="cpu", backend="native") as engine:
        engine.deployment = Deployment("xla", "cpu", 1, 1)
        resolved = resolve_auto(config, engine)
    assert (resolved.memory.gradient_checkpointing, resolved.compile.enabled) == ("full", False)
    # One that is open adopts what a plan chose, as if opened so: on GPUs compiled layers run attention over blocks.
    with pf.open_backend(without_plan(config), device="cpu", backend="native") as engine:
        engine.deployment = Deployment("native", "cuda", 1, 1)
        engine.adopt(with_settings(config, {"compile.enabled": "false"}))
        assert not engine.runs_blocks
        engine.adopt(with_settings(config, {"compile.enabled": "true"}))
        assert engine.runs_blocks
    for engine, device in (("native", "tpu"), ("xla", "cpu"), ("xla_fsdp1", "tpu")):
        with pytest.raises(BackendError, match=f"backend {engine} on {device}: train.micro_batch=auto"):
            require_supported(load_config(path, [ROWS]), Deployment(engine, device))
    with pytest.raises(BackendError, match=r"without compile\.enabled=true"):
        require_supported(load_config(path, ["compile.backend=aot_eager"]), Deployment("native", "cpu"))
    require_supported(load_config(path, [AUTO[2], "compile.backend=inductor"]), Deployment("native", "cuda"))
