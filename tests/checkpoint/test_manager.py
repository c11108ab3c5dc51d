"""Saving, finding and loading, with one and with several processes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_backend import (
    PlainBackend,
    checkpoints,
    in_processes,
    save_once,
    small_model,
    snapshot,
)

from portable_fsdp.backends.base import Part, TensorState
from portable_fsdp.runtime.errors import CheckpointError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("writers", "devices"), [(1, 1), (1, 4), (2, 1), (3, 2)])
@pytest.mark.parametrize(("readers", "reader_devices"), [(1, 1), (1, 3), (2, 1), (3, 1)])
def test_what_any_number_of_processes_saved_any_number_reads_bit_for_bit(
    tmp_path: Path, writers: int, devices: int, readers: int, reader_devices: int
) -> None:
    path = save_once(tmp_path, step=5, seed=1, count=writers, devices=devices)

    def work(backend: PlainBackend) -> dict[str, bytes]:
        model, optimizer = small_model(seed=2)
        manifest = checkpoints(tmp_path, backend).load(path, model, optimizer)
        assert (manifest.step, manifest.data.epoch, manifest.data.position) == (5, 1, 20)
        return snapshot(model, optimizer)

    expected = snapshot(*small_model(seed=1))
    assert in_processes(readers, work, reader_devices) == [expected] * readers
    assert expected != snapshot(*small_model(seed=2))


def test_a_committed_folder_holds_manifest_and_shards_alone(tmp_path: Path) -> None:
    path = save_once(tmp_path, count=2, devices=2)
    assert names(tmp_path) == ["step-00000005"]
    assert names(path) == ["manifest.json", "model", "optimizer"]
    assert names(path / "model") == [f"shard-0000{p}-0{k}.safetensors" for p in (0, 1) for k in (0, 1)]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["written_by"]["process_count"] == 2
    assert manifest["config"] == {"optim": {"lr": 0.001}}


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    before = (path / "manifest.json").read_bytes()

    def work(backend: PlainBackend) -> None:
        checkpoints(tmp_path, backend).save(5, *small_model(seed=2), (0, 0))

    results = in_processes(2, work)
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "found it committed" in str(results[1])
    assert (path / "manifest.json").read_bytes() == before
    assert names(tmp_path) == ["step-00000005"]


def test_one_process_that_cannot_write_fails_the_save_of_all(tmp_path: Path) -> None:
    class Broken(PlainBackend):
        def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
            state = super().state(model, optimizer)
            if self.process.index == 1:
                state["0.weight"].pieces[0] = state["0.weight"].pieces[0]._replace(data=torch.zeros(4, 5).double())
            return state

    def work(backend: PlainBackend) -> Path:
        backend = Broken(backend.process, 1, backend.meeting)
        return checkpoints(tmp_path, backend).save(5, *small_model(seed=1), (0, 0))

    results = in_processes(3, work)
    assert [type(result) for result in results] == [CheckpointError] * 3
    assert all("process 1 could not write: TypeError: 0.weight" in str(result) for result in results)
    assert names(tmp_path) == ["step-00000005.tmp"]


def test_processes_that_hold_less_than_the_whole_tensor_commit_nothing(tmp_path: Path) -> None:
    class Forgetful(PlainBackend):
        def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
            state = super().state(model, optimizer)
            del state["1.weight"].pieces[0]
            return state

    backend = Forgetful(devices=2)
    with pytest.raises(CheckpointError, match=r"1\.weight: expected pieces of 21 elements in all, found 7"):
        checkpoints(tmp_path, backend).save(5, *small_model(seed=1), (0, 0))
    assert names(tmp_path) == ["step-00000005.tmp"]


class Alone(PlainBackend):
    """The only one of its processes that runs; the others agree to all it says, and process 0 to all it asks."""

    def agree(self, value: Any) -> Any:
        return value if self.process.index == 0 else ("attempt", None)


def test_a_save_waits_for_every_process_and_names_the_missing(tmp_path: Path) -> None:
    alone = Alone(Part(0, 3))
    with pytest.raises(CheckpointError, match=r"found none of process 1, 2 after 0 s"):
        checkpoints(tmp_path, alone, wait_s=0.05).save(5, *small_model(seed=1), (0, 0))


def test_a_folder_that_this_process_does_not_see_is_named(tmp_path: Path) -> None:
    alone = Alone(Part(1, 2))
    with pytest.raises(CheckpointError, match=r"process 1 finds\n  none: run.dir must lie on a file system"):
        checkpoints(tmp_path, alone).save(5, *small_model(seed=1), (0, 0))


def test_the_first_save_removes_debris_and_nothing_else(tmp_path: Path) -> None:
    save_once(tmp_path)
    (tmp_path / "step-00000006.tmp" / "model").mkdir(parents=True)
    (tmp_path / "notes.tmp").touch()
    (tmp_path / "step-00000004.damaged-1").mkdir()
    opened = checkpoints(tmp_path, PlainBackend())
    opened.find("auto")
    assert (tmp_path / "step-00000006.tmp" / "model").is_dir()  # it may be another run's save, if this start is refused
    opened.save(7, *small_model(seed=1), (0, 0))
    assert names(tmp_path) == ["notes.tmp", "step-00000004.damaged-1", "step-00000005", "step-00000007"]


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    opened = checkpoints(folder, PlainBackend())
    assert opened.find("auto") is None
    assert opened.find("none") is None
    assert not folder.exists()


def test_auto_takes_the_newest(tmp_path: Path) -> None:
    save_once(tmp_path, step=5)
    newest = save_once(tmp_path, step=10)
    (tmp_path / "step-00000015.tmp").mkdir()
    assert in_processes(2, lambda backend: checkpoints(tmp_path, backend).find("auto")) == [newest] * 2


def test_auto_goes_past_a_damaged_one_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newest = save_once(tmp_path, step=5), save_once(tmp_path, step=10)
    flip_last_byte(newest / "model" / "shard-00001-00.safetensors")

    def work(backend: PlainBackend) -> tuple[Path | None, Path]:
        opened = checkpoints(tmp_path, backend)
        return opened.find("auto"), opened.save(10, *small_model(seed=3), (0, 0))

    with caplog.at_level(logging.WARNING, logger="portable_fsdp"):
        results = in_processes(2, work)
    assert results == [(older, newest)] * 2
    assert "step-00000010: model/shard-00001-00.safetensors: expected content" in caplog.text
    assert "resuming from the older step-00000005" in caplog.text
    assert len(caplog.records) == 2
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000010.damaged-1"]


def test_auto_never_falls_back_to_fresh_weights(tmp_path: Path) -> None:
    (save_once(tmp_path, step=5) / "manifest.json").unlink()
    flip_last_byte(save_once(tmp_path, step=10) / "optimizer" / "shard-00000-00.safetensors")
    results = in_processes(2, lambda backend: checkpoints(tmp_path, backend).find("auto"))
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "found 2, all damaged" in str(results[1])


def test_none_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    save_once(tmp_path)
    with pytest.raises(CheckpointError, match=r"found step-00000005\.\n  Use checkpoint\.resume: auto"):
        checkpoints(tmp_path, PlainBackend()).find("none")


def test_a_named_checkpoint_must_be_whole(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    opened = checkpoints(tmp_path / "other", PlainBackend())
    assert opened.find(str(path)) == path
    (path / "model" / "shard-00000-00.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found none"):
        opened.find(str(path))
    with pytest.raises(CheckpointError, match="expected auto, none, or a checkpoint's folder"):
        opened.find(str(tmp_path / "atuo"))


def test_a_named_checkpoint_older_than_the_runs_own_is_refused(tmp_path: Path) -> None:
    older = save_once(tmp_path, step=5)
    save_once(tmp_path, step=10)
    with pytest.raises(CheckpointError, match="already holds step-00000010"):
        checkpoints(tmp_path, PlainBackend()).find(str(older))


def test_another_models_checkpoint_is_refused_by_all_processes(tmp_path: Path) -> None:
    path = save_once(tmp_path)

    def work(backend: PlainBackend) -> None:
        checkpoints(tmp_path, backend).load(path, *small_model(seed=1, hidden=8))

    results = in_processes(2, work)
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "0.weight: expected float32 [8, 5] (this model),\n  found float32 [7, 5]" in str(results[0])


def test_a_load_hashes_what_it_reads(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    flip_last_byte(path / "model" / "shard-00000-00.safetensors")
    with pytest.raises(CheckpointError, match="xxh3_128"):
        checkpoints(tmp_path, PlainBackend()).load(path, *small_model(seed=1))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
