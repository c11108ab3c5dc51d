"""A run that an earlier release began resumes, bit for bit, from that release's own files in `made_before`.

`launch --device=cpu` wrote them with torch 2.9 on native: a Llama of 2,552 parameters, stopped after step 2 of 4. Never
write them again: they show that a newer release opens what an older one saved.
"""

import shutil
from pathlib import Path

import pytest
from plain_backend import named_tensors
from safetensors.torch import load_file

from portable_fsdp.backends.open import open_backend
from portable_fsdp.convert.read import load_config
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.train.build import build_training, open_checkpoints
from portable_fsdp.train.loop import train
from portable_fsdp.train.preflight import open_data

pytestmark = pytest.mark.slow

LOSSES = [5.386707305908203, 5.345849990844727]
"""Steps 3 and 4 of the same run without a stop, by the release that wrote the files."""


def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and optimizer are loaded bit for bit, and have the losses of a run without a stop."""
    shutil.copytree(Path(__file__).parent / "made_before", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = Path("run")  # in the working folder, as at that time
    config = load_config(str(run / "config.yaml"), [])
    with open_backend(config, device="cpu", backend="native") as backend:
        config, corpus = open_data(config, backend)
        training = build_training(config, backend, corpus.tokenizer, rows=corpus.rows)
        with open_checkpoints(config, backend, training, corpus) as checkpoints:
            point = checkpoints.find("auto")
            assert point is not None
            resumed = checkpoints.load(point, training.model, training.optimizer)
        assert (resumed.step, resumed.position, resumed.changes) == (2, (0, 8), ())
        actual = named_tensors(training.model, training.optimizer)
    files = list((run / "checkpoints/step-00000002").rglob("*.safetensors"))
    expected = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert len(expected) == 44
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype
        assert actual[key].shape == tensor.shape
        assert actual[key].numpy().tobytes() == tensor.numpy().tobytes(), key
    config = load_config(str(run / "config.yaml"), ["train.stop_at=null"])
    assert train(config, device="cpu", backend="native") == 0
    assert [row["loss"] for row in read_jsonl(run / "metrics.jsonl")] == pytest.approx(LOSSES, rel=1e-6, abs=0)
