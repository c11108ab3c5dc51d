"""`python -m portable_fsdp.parity`: equal runs, planted faults by name, and input that no place can run."""

import json
import math
from pathlib import Path

import pytest
from faulty_worker import FAULTS, plant
from parity_faults import certified, rows, write_config

from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.convert.read import load_config
from portable_fsdp.parity.__main__ import main
from portable_fsdp.parity.record import Place, PlaceRecord, RunTask, deviation, find_culprit
from portable_fsdp.parity.recorder import run


@pytest.mark.slow
def test_equal_runs_get_a_certificate_and_two_certificates_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layouts differ (two micro batches beside one), with gradient checkpointing; nothing is written to run.dir."""
    more = ["memory.gradient_checkpointing=full", "train.micro_batch=4", "--steps=3"]
    equal = certified(tmp_path, "--on=native:1,native:2", *more)
    assert (equal.exit_code, equal.certificate.verdict) == (0, "equal")
    [found] = equal.certificate.deviations
    assert (len(found.losses), found.first_step, found.culprit) == (3, None, None)
    assert max(found.losses) < 1e-6
    assert equal.text.startswith("# Parity: equal\n")
    assert (tmp_path / "out/certificate.md").read_text() == equal.text.rstrip("\n") + "\n"
    assert "transformers 5." in equal.text
    assert not (tmp_path / "run").exists()

    first, other, changed = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    first.write_text(equal.certificate.model_dump_json())
    records = equal.certificate.records
    other.write_text(equal.certificate.model_copy(update={"records": records[1:]}).model_dump_json())
    assert main(["--compare", str(first), str(other)]) == 0
    assert "native:2 vs. native:1" in capsys.readouterr().out
    values = json.loads(other.read_text())
    values["records"][0]["losses"][1] *= 1 + 1e-4
    changed.write_text(json.dumps(values))
    assert main(["--compare", str(first), str(changed), f"--out={tmp_path}/compared"]) == 1
    assert "first step beyond a bound: 2" in (tmp_path / "compared/certificate.md").read_text()
    values["config"] = values["config"].replace('"lr":0.002', '"lr":0.003')
    changed.write_text(json.dumps(values))
    capsys.readouterr()
    assert main(["--compare", str(first), str(changed)]) == 2
    assert "found other optim in" in capsys.readouterr().err


@pytest.mark.slow
def test_faults_are_named_by_what_they_change(tmp_path: Path) -> None:
    """Forward, backward and optimizer, in this process; nothing is named where nothing is wrong."""
    task = RunTask(config=load_config(write_config(tmp_path)).model_dump_json(), steps=1, records=True)

    def record(name: str | None) -> PlaceRecord:
        return run(Place(device="cpu", engine="native", devices=1), task, lambda training: plant(name, training))

    right = record(None)
    assert find_culprit(right, record(None), 1e-5) is None
    for name in ("mask off by one", "gradient of k_proj", "decay of a norm"):
        culprit = find_culprit(right, record(name), 1e-5)
        assert culprit is not None, name
        assert FAULTS[name].is_named(culprit), culprit


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.timeout(3600)
def test_each_planted_fault_is_named() -> None:
    """benchmarks/results/parity_faults.md has the table."""
    assert len(FAULTS) >= 10
    for is_named, row in rows("native:2,xla:4", list(FAULTS)):
        assert is_named, row


def test_float16_steps_that_both_places_skip_agree(tmp_path: Path) -> None:
    place = Place(device="cpu", engine="native", devices=1)
    losses, norms = [4.0, 3.0], [math.inf, 1.0]
    record = PlaceRecord(place=place, device_name="cpu", versions={}, losses=losses, grad_norms=norms)
    one_skips = record.model_copy(update={"grad_norms": [2.0, 1.0]})
    for compute, first_step in (("float16", None), ("bfloat16", 1)):
        config = load_config(write_config(tmp_path), [f"precision.compute={compute}"])
        assert deviation(config, record, record).first_step == first_step
        assert deviation(config, record, one_skips).first_step == 1


def test_what_needs_a_compiler_is_off_while_modules_are_recorded(tmp_path: Path) -> None:
    for engine, settings in (
        ("native", ["compile.enabled=true", "compile.backend=aot_eager", "memory.gradient_checkpointing=budget"]),
        ("xla", ["compile.scan_layers=true", "memory.gradient_checkpointing=full", "memory.offload=activations"]),
    ):
        config = load_config(write_config(tmp_path), settings)
        place = Deployment(engine, "cpu", 1, 1)
        require_supported(config, place)
        require_supported(config.without_compiler(), place)


WRONG = {
    "--on=native:2,xla": "--on=native:2,xla: expected ENGINE:DEVICES,..., as in native:2,xla:4, found 'xla'.",
    "--on=native:0": "found 'native:0'",
    "--on=native:2,": "found ''",
    "--on=jax:2": "--backend=jax: expected one of auto, native, xla, xla_fsdp1.",
    "--on=native:2,native:3 train.micro_batch=4": "train.micro_batch: expected at most 3, the rows of each of 3",
    "--on=native:1 --steps=51": "--steps: expected at most 50",
    "--on=native:1 --steps=21 precision.compute=bfloat16": "--steps: expected at most 20",
    "--on=native:1 --steps=0": "expected a whole number of at least 1, found 0",
    "--on=xla:1 --device=cuda": "backend xla on cuda: torch_xla dropped its CUDA support",
    "--on=native:1,native:2 xla_fsdp1.flatten_parameters=true": "backend native on cpu (1 device(s) of 1",
    "--on=native:1 data.path=/none.txt": "/none.txt",
    "--on=native:1 optim.lrr=1": "nearest: optim.lr",
    "--on=native:1 other.yaml": "expected one CONFIG and --on=PLACES",
    "": "expected one CONFIG and --on=PLACES",
    "--compare a.json b.json --on=native:1": "--compare: it runs nothing",
    "--on=native:1 --out=/proc/none": "--out: /proc/none: the folder can't be created",
}


def test_what_no_place_can_run_is_refused_before_any_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path))
    for words, message in WRONG.items():
        device = [] if "--device" in words else ["--device=cpu"]
        config = [] if "--compare" in words else [path]
        assert main([*config, *device, *words.split()]) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert (shown.out, "step(s)" in shown.err) == ("", False), words
        assert not (tmp_path / "run").exists()


def test_a_launcher_and_files_that_are_no_certificates_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text('{"verdict": "equal"}')
    assert main(["--compare", f"{tmp_path}/a.json", f"{tmp_path}/none.json"]) == 2
    assert "expected two certificate.json files" in capsys.readouterr().err
    for name in ("RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=x", "MASTER_PORT=1"):
        monkeypatch.setenv(*name.split("="))
    assert main([str(write_config(tmp_path)), "--on=native:1", "--device=cpu"]) == 2
    assert "a launcher started this process; start parity directly" in capsys.readouterr().err
