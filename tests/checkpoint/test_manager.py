"""Saving, finding and loading, with one and with several processes."""

import errno
import json
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from plain_backend import (
    PlainBackend,
    checkpoints,
    in_processes,
    load,
    named_tensors,
    save_once,
    small_model,
    snapshot,
    what_is_written,
)

from portable_fsdp.backends.base import Piece, Rank, TensorState
from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.background import Snapshot
from portable_fsdp.checkpoint.config_diff import Difference
from portable_fsdp.checkpoint.format import step_folder
from portable_fsdp.checkpoint.manager import Fingerprint, Resumed, ResumePoint, Saved
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config import schema
from portable_fsdp.runtime.errors import CheckpointError, ConfigError


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
        resumed = load(checkpoints(tmp_path, backend), model, optimizer, str(path))
        assert (resumed.step, resumed.position, resumed.changes) == (5, (1, 20), ())
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
                wrong = [Piece((4, 0), torch.zeros(4, 5).double())]
                state["0.weight"] = replace(state["0.weight"], pieces=lambda: wrong)
            return state

    def work(backend: PlainBackend) -> Path:
        backend = Broken(backend.process, 1, backend.meeting)
        return checkpoints(tmp_path, backend).save(5, *small_model(seed=1), (0, 0))

    results = in_processes(3, work)
    assert [type(result) for result in results] == [CheckpointError] * 3
    assert all("process 1 could not write: TypeError: 0.weight" in str(result) for result in results)
    assert names(tmp_path) == []


def test_processes_that_hold_less_than_the_whole_tensor_commit_nothing(tmp_path: Path) -> None:
    class Forgetful(PlainBackend):
        def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
            state = super().state(model, optimizer)
            pieces = state["1.weight"].pieces()[1:]
            state["1.weight"] = replace(state["1.weight"], pieces=lambda: pieces)
            return state

    backend = Forgetful(devices=2)
    with pytest.raises(CheckpointError, match=r"1\.weight: expected pieces of 21 elements in all, found 7"):
        checkpoints(tmp_path, backend).save(5, *small_model(seed=1), (0, 0))
    assert names(tmp_path) == []


class Alone(PlainBackend):
    """The only one of its processes that runs; the others agree to all it says, and process 0 to all it asks."""

    def agree(self, value: Any) -> Any:
        return value if self.process.index == 0 else ("attempt", None)

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_a_save_waits_for_every_process_and_names_the_missing(tmp_path: Path) -> None:
    alone = Alone(Rank(0, 3))
    with pytest.raises(CheckpointError, match=r"found none of process 1, 2 after 0 s"):
        checkpoints(tmp_path, alone, wait_s=0.05).save(5, *small_model(seed=1), (0, 0))


def test_a_folder_that_this_process_does_not_see_is_named(tmp_path: Path) -> None:
    alone = Alone(Rank(1, 2))
    with pytest.raises(
        CheckpointError, match=r"process 1 cannot see .*process 0 created:\n  checkpoints must lie on a file system"
    ):
        checkpoints(tmp_path, alone).save(5, *small_model(seed=1), (0, 0))


def test_the_first_save_removes_its_own_debris_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_once(tmp_path)
    for step, run in ((6, ""), (8, "another")):
        (tmp_path / f"step-0000000{step}.tmp-0a1b2c3d" / "model").mkdir(parents=True)
        mark = tmp_path / f"step-0000000{step}.tmp-0a1b2c3d" / "attempt.json"
        mark.write_text(json.dumps({"run": run, "attempt": "x"}))
    (tmp_path / "step-00000009.tmp-0a1b2c3d").mkdir()  # killed before it was marked: nothing is lost with it
    (tmp_path / "step-00000007.tmp-0a1b2c3d").mkdir()  # not ours: no attempt of ours has files and no mark
    (tmp_path / "step-00000007.tmp-0a1b2c3d" / "notes").touch()
    (tmp_path / "notes.tmp").touch()
    (tmp_path / ".portable_fsdp-0a1b2c3d").touch()  # killed while it looked whether all processes see the folder
    (tmp_path / "step-00000004.damaged-1").mkdir()
    opened = checkpoints(tmp_path, PlainBackend())
    opened.find("auto")
    assert (tmp_path / "step-00000006.tmp-0a1b2c3d" / "model").is_dir()  # nothing is changed if this start is refused
    opened.save(7, *small_model(seed=1), (0, 0))
    left = ["notes.tmp", "step-00000004.damaged-1", "step-00000005", "step-00000007"]
    assert names(tmp_path) == [*left, "step-00000007.tmp-0a1b2c3d", "step-00000008.tmp-0a1b2c3d"]
    opened.save(8, *small_model(seed=1), (0, 0))
    assert "expected no other run at work there, found step-00000008.tmp-0a1b2c3d of run 'another'" in caplog.text
    assert (tmp_path / "step-00000008.tmp-0a1b2c3d").is_dir()


def test_a_straggler_of_an_earlier_attempt_finds_no_folder(tmp_path: Path) -> None:
    """Process 1 of a killed attempt goes on while the next one saves the same step, and after its commit."""
    straggler = PlainBackend(Rank(1, 2))
    final = step_folder(tmp_path, 5)
    old = checkpoints(tmp_path, straggler)
    attempt = commit.begin(final, "")
    state = straggler.state(*small_model(seed=4))
    part = what_is_written(state)

    def work(backend: PlainBackend) -> None:
        ours = checkpoints(tmp_path, backend)
        ours.save(5, *small_model(seed=5), (0, 5))

    def straggle() -> None:
        with pytest.raises(CheckpointError, match="process 1 cannot see"):
            old._write_part(final, attempt, *part)

    class Between(PlainBackend):
        def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
            straggle()  # the next attempt has begun
            return super().state(model, optimizer)

    assert in_processes(2, lambda backend: work(Between(backend.process, 1, backend.meeting))) == [None, None]
    straggle()
    model, optimizer = small_model(seed=9)
    load(checkpoints(tmp_path, PlainBackend()), model, optimizer)
    assert snapshot(model, optimizer) == snapshot(*small_model(seed=5))
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), os.fsdecode(b"runs/\xff")])
def test_what_json_does_not_give_back_is_refused_when_the_run_opens(tmp_path: Path, value: Any) -> None:
    for config, model_config in (({"run": {"dir": value}}, None), ({}, {"limit": [0.0, value]})):
        with pytest.raises(CheckpointError, match=r"config: expected values that JSON can hold, found"):
            checkpoints(tmp_path, PlainBackend(), config=config, model_config=model_config)


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
    found = in_processes(2, lambda backend: checkpoints(tmp_path, backend).find("auto"))
    assert found == [ResumePoint(newest, (), is_own=True)] * 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # the probe is gone


def test_auto_goes_past_a_damaged_one_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newest = save_once(tmp_path, step=5), save_once(tmp_path, step=10)
    flip_last_byte(newest / "model" / "shard-00001-00.safetensors")

    def work(backend: PlainBackend) -> tuple[Path, Path]:
        opened = checkpoints(tmp_path, backend)
        found = opened.find("auto")
        assert found is not None
        assert "step-00000010: model/shard-00001-00.safetensors: expected content" in found.passed_over[0]
        return found.path, opened.save(10, *small_model(seed=3), (0, 0))

    with caplog.at_level(logging.WARNING, logger="portable_fsdp"):
        results = in_processes(2, work)
    assert results == [(older, newest)] * 2
    assert "step-00000010: model/shard-00001-00.safetensors: expected content" in caplog.text
    assert "resuming from the older step-00000005" in caplog.text
    assert len(caplog.records) == 4  # two by each process; a run's log is that of process 0
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
    assert opened.find(str(path)) == ResumePoint(path, (), is_own=False)
    (path / "model" / "shard-00000-00.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found none"):
        opened.find(str(path))
    with pytest.raises(CheckpointError, match="expected auto, none, or a checkpoint's folder"):
        opened.find(str(tmp_path / "atuo"))


def test_a_named_checkpoint_older_than_the_runs_own_is_refused(tmp_path: Path) -> None:
    older = save_once(tmp_path, step=5)
    save_once(tmp_path, step=10)
    with pytest.raises(CheckpointError, match=r"would begin at step 5, but .* already\n  holds step-00000010"):
        checkpoints(tmp_path, PlainBackend()).find(str(older))


def test_another_models_checkpoint_is_refused_by_all_processes(tmp_path: Path) -> None:
    save_once(tmp_path)

    def work(backend: PlainBackend) -> None:
        load(checkpoints(tmp_path, backend), *small_model(seed=1, hidden=8))

    results = in_processes(2, work)
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert all("    0.weight             float32 [8, 5]  float32 [7, 5]\n" in str(result) for result in results)


def test_what_one_process_finds_damaged_all_refuse(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    flip_last_byte(path / "model" / "shard-00001-00.safetensors")  # the share of one of two
    results = in_processes(2, lambda backend: checkpoints(tmp_path, backend).find(str(path)))
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert all("shard-00001-00.safetensors: expected content with xxh3_128" in str(result) for result in results)


@pytest.mark.parametrize(
    ("verify", "flipped", "cut"), [("full", True, True), ("size", False, True), ("off", False, False)]
)
def test_verify_says_how_much_is_checked(tmp_path: Path, verify: str, flipped: bool, cut: bool) -> None:
    file = save_once(tmp_path) / "model" / "shard-00000-00.safetensors"

    def is_refused() -> bool:
        try:
            return checkpoints(tmp_path, PlainBackend(), {"verify": verify}).find("auto") is None
        except CheckpointError:
            return True

    assert not is_refused()
    flip_last_byte(file)
    assert is_refused() == flipped
    file.write_bytes(file.read_bytes()[:-1])
    assert is_refused() == cut


CONFIG = {"run": {"name": "a", "seed": 1}, "optim": {"lr": 0.1, "eps": 1}, "train": {"steps": 9, "micro_batch": 2}}


def changed(**changes: Any) -> dict[str, Any]:
    return {section: {**keys, **changes.get(section, {})} for section, keys in CONFIG.items()}


def resumed_with(folder: Path, settings: dict[str, Any], **arguments: Any) -> Resumed:
    opened = checkpoints(
        folder, PlainBackend(), settings, **{"config": CONFIG, "data": Fingerprint("r", "t"), **arguments}
    )
    return load(opened, *small_model(seed=2), str(settings.get("resume", "auto")))


def save_with(folder: Path) -> Path:
    opened = checkpoints(folder, PlainBackend(), config=CONFIG, data=Fingerprint("r", "t"))
    return opened.save(5, *small_model(seed=1), (0, 20))


LONG = "/storage/of/the/team/that/pays/for/it/corpora/" * 2


@pytest.mark.parametrize(
    ("saved", "now", "row"),
    [
        (
            {"hidden_size": 64, "model_type": "llama", "rope": {"theta": 1e4, "x": 1}, "vocab": 8},
            {"hidden_size": 64, "model_type": "llama", "rope": {"theta": 1e5, "x": 1}},
            ["k.rope.theta: 10000.0, now 100000.0", "k.vocab: 8, now null"],
        ),
        (
            f"{LONG}a.jsonl",
            f"{LONG}b.jsonl",
            ['k: "/storage/of...t/corpora/a.jsonl", now "/storage/of...t/corpora/b.jsonl"'],
        ),
        (
            list(range(40)),
            [*range(29), 0, *range(30, 40)],
            [
                "k: [0, 1, 2, 3,..., 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, ..., "
                "now [0, 1, 2, 3,..., 27, 28, 0, 30, 31, 32, 33, 34, 35, 36, 3..."
            ],
        ),
        ("short", LONG, [f'k: "short", now "{LONG[:56]}...']),
        ("same beginning" + "x" * 80, "same beginning", [f'k: "same beginning{"x" * 42}..., now "same beginning"']),
    ],
    ids=["mapping", "end", "middle", "short", "shorter"],
)
def test_a_long_value_is_cut_so_that_the_difference_stays(saved: Any, now: Any, row: list[str]) -> None:
    assert Difference("k", saved, now, True).lines() == row


def test_another_curve_is_refused_with_a_table_and_allowed_by_name(tmp_path: Path) -> None:
    save_with(tmp_path)
    other = changed(optim={"lr": 0.2}, train={"steps": 18, "micro_batch": 1})
    with pytest.raises(CheckpointError) as error:
        resumed_with(tmp_path, {}, config=other)
    assert str(error.value).splitlines() == [
        "checkpoint step-00000005: expected the config of the run that saved it, found another:",
        "                 saved  now",
        "    optim.lr     0.1    0.2",
        "    train.steps  9      18",
        "  If you mean it, allow it by name: checkpoint.allow='[optim.lr, train.steps]'.",
        "  To start anew from its weights, name it, and a new folder: checkpoint.load=weights_only",
        "  checkpoint.resume=FOLDER run.dir=ANOTHER.",
    ]
    with pytest.raises(CheckpointError, match=r"allow='\[train\.steps\]'"):
        resumed_with(tmp_path, {"allow": ("optim",)}, config=other)
    resumed = resumed_with(tmp_path, {"allow": ("optim", "train.steps")}, config=other)
    assert {str(one) for one in resumed.changes} == {
        "optim.lr: 0.1, now 0.2",
        "train.steps: 9, now 18",
        "train.micro_batch: 2, now 1",
    }
    assert {one.name for one in resumed.changes if not one.makes_curve} == {"train.micro_batch"}


def test_other_data_is_refused(tmp_path: Path) -> None:
    save_with(tmp_path)
    with pytest.raises(CheckpointError, match=r'data\.rows  "r"    "other"'):
        resumed_with(tmp_path, {}, data=Fingerprint("other", "t"))
    assert resumed_with(tmp_path, {"allow": ("data",)}, data=Fingerprint("other", "t")).step == 5


def test_another_path_to_the_same_data_is_no_difference(tmp_path: Path) -> None:
    config = {**CONFIG, "data": {"path": "old"}}
    opened = checkpoints(tmp_path, PlainBackend(), config=config, data=Fingerprint("r", "t"))
    opened.save(5, *small_model(seed=1), (0, 20))
    moved = {**CONFIG, "data": {"path": "new"}}
    assert resumed_with(tmp_path, {}, config=moved).changes == ()
    with pytest.raises(CheckpointError, match=r"data\.path"):
        resumed_with(tmp_path, {}, config=moved, data=Fingerprint())


def test_a_name_that_allows_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.allow: expected names .* found optim\.rate, sharding"):
        checkpoints(tmp_path, PlainBackend(), {"allow": ("optim.lr", "optim.rate", "sharding")}, config=CONFIG)


def test_weights_only_starts_anew_from_other_weights(tmp_path: Path) -> None:
    path = save_with(tmp_path / "first")
    model, optimizer = small_model(seed=2)
    settings = {"load": "weights_only", "resume": str(path)}
    config = changed(optim={"lr": 3}) | {"checkpoint": settings}
    opened = checkpoints(tmp_path / "second", PlainBackend(), settings, config=config)
    resumed = load(opened, model, optimizer, str(path))
    assert (resumed.step, resumed.position, resumed.weights_only) == (0, (0, 0), True)
    found, expected = snapshot(model, optimizer), snapshot(*small_model(seed=1))
    assert all(found[key] == (expected[key] if "/" not in key else bytes(len(expected[key]))) for key in found)
    opened.save(7, model, optimizer, (0, 3))
    same = checkpoints(tmp_path / "second", PlainBackend(), settings, config=changed(optim={"lr": 3}))
    again = load(same, model, optimizer, str(path))
    assert (again.step, again.weights_only) == (7, False)  # the same command goes on with the run's own


def test_other_ties_are_another_model(tmp_path: Path) -> None:
    checkpoints(tmp_path, PlainBackend(), ties={"head": "0.weight"}).save(5, *small_model(seed=1), (0, 0))
    opened = checkpoints(tmp_path, PlainBackend(), ties={"head": "1.weight"})
    with pytest.raises(CheckpointError, match=r"head  tied to 1\.weight  tied to 0\.weight"):
        load(opened, *small_model(seed=1))


# ------------------------------------------------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (1, None, [10]),
        (2, None, [8, 10]),
        (1, 4, [4, 8, 10]),
        (9, None, [2, 4, 6, 8, 10]),
    ],
)
def test_retention(tmp_path: Path, keep: int | None, keep_every: int | None, left: list[int]) -> None:
    opened = checkpoints(tmp_path, PlainBackend(), {"keep": keep, "keep_every": keep_every})
    for step in (2, 4, 6, 8, 10):
        opened.save(step, *small_model(seed=1), (0, 0))
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]
    removed = [step for saved in opened.finished() for step in saved.removed]
    assert sorted([*removed, *left]) == [2, 4, 6, 8, 10]


def test_retention_follows_no_link_and_counts_nothing_that_was_cut(tmp_path: Path) -> None:
    first = checkpoints(tmp_path, PlainBackend())
    for step in (1, 2, 3, 4):
        first.save(step, *small_model(seed=step), (0, 0))
    archive = (tmp_path / "step-00000001").rename(tmp_path / "archive")
    (tmp_path / "step-00000001").symlink_to(archive)
    shard = tmp_path / "step-00000004" / "model" / "shard-00000-00.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    again = checkpoints(tmp_path, PlainBackend(), {"keep": 2})
    again.save(5, *small_model(seed=5), (0, 0))
    assert names(tmp_path) == ["archive", *(f"step-0000000{step}" for step in (1, 3, 4, 5))]
    assert names(archive) == ["manifest.json", "model", "optimizer"]
    assert [saved.removed for saved in again.finished()] == [(2,)]


@pytest.mark.parametrize("trouble", ["it is gone", "its new name is taken"])
def test_what_retention_cannot_delete_is_a_warning(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = checkpoints(tmp_path, PlainBackend(), {"keep": 1})
    opened.save(1, *small_model(seed=1), (0, 0))
    if trouble == "it is gone":
        shutil.rmtree(tmp_path / "step-00000001")
    else:
        monkeypatch.setattr(commit, "delete", fails_to_delete)
    opened.save(2, *small_model(seed=2), (0, 0))
    assert "step-00000002 is saved; an older checkpoint could not be deleted" in caplog.text
    monkeypatch.undo()
    opened.save(3, *small_model(seed=3), (0, 0))
    assert [(saved.step, saved.removed) for saved in opened.finished()] == [(1, ()), (2, ()), (3, (2,))]


def fails_to_delete(folder: Path, run: str) -> None:
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))


def test_retention_leaves_what_others_wrote_and_what_is_damaged(tmp_path: Path) -> None:
    checkpoints(tmp_path, PlainBackend(), config={"run": {"name": "other"}}).save(1, *small_model(seed=1), (0, 0))
    mine = checkpoints(tmp_path, PlainBackend())
    mine.save(2, *small_model(seed=1), (0, 0))
    mine.save(3, *small_model(seed=1), (0, 0))
    flip_last_byte(tmp_path / "step-00000003" / "manifest.json")
    resumed = checkpoints(tmp_path, PlainBackend(), {"keep": 1})
    found = resumed.find("auto")
    assert found is not None
    assert found.path.name == "step-00000002"
    resumed.save(4, *small_model(seed=1), (0, 0))
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


# ------------------------------------------------------------------------------------------------------ background


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> list[dict[str, bytes]]:
        opened = checkpoints(tmp_path, backend, {"async_save": True})
        model, optimizer = small_model(seed=1)
        for step in (1, 2, 3):
            opened.save(step, model, optimizer, (0, 0))
            for tensor in named_tensors(model, optimizer).values():
                tensor.add_(1)  # the next step runs while the files are written
        opened.wait()
        found: list[dict[str, bytes]] = []
        for path in (tmp_path / f"step-0000000{step}" for step in (1, 2, 3)):
            with Reader(path) as reader:
                backend.load_state(model, optimizer, reader.read)
            found.append(snapshot(model, optimizer))
        return found

    model, optimizer = small_model(seed=1)
    expected: list[dict[str, bytes]] = []
    for _ in range(3):
        expected.append(snapshot(model, optimizer))
        for tensor in named_tensors(model, optimizer).values():
            tensor.add_(1)
    assert in_processes(2, work) == [expected] * 2


def test_buffers_of_background_saves_are_taken_again() -> None:
    state = PlainBackend().state(*small_model(seed=1))
    snapshots = Snapshot()
    first, second = (snapshots.take((key, one.pieces()) for key, one in state.items()) for _ in range(2))
    for key, one in state.items():
        for mine, before, piece in zip(first[key], second[key], one.pieces(), strict=True):
            assert mine.data.data_ptr() == before.data.data_ptr() != piece.data.data_ptr()


def test_a_failed_background_save_fails_the_next_call_on_all_processes(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> tuple[str, bool]:
        opened = checkpoints(tmp_path, backend, {"async_save": True})
        opened.save(1, *small_model(seed=1), (0, 0))
        opened.wait()
        if backend.process.index == 0:
            (tmp_path / "step-00000002").touch()  # a file in the place of the folder: the rename fails
        opened.save(2, *small_model(seed=1), (0, 0))
        deadline = time.monotonic() + 10
        while backend.process.index == 0 and not opened.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(CheckpointError) as error:
            opened.save(3, *small_model(seed=1), (0, 0))
        return str(error.value), opened.failed

    results = in_processes(2, work)
    assert results[0] == results[1]
    assert "NotADirectoryError" in results[0][0]
    assert [name[:17] for name in names(tmp_path)] == ["step-00000001", "step-00000002"]


def test_closing_lets_a_save_commit_whose_other_process_is_a_moment_late(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> list[Saved]:
        class Late(PlainBackend):
            def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
                if self.process.index == 1:
                    time.sleep(0.5)
                return super().state(model, optimizer)

        opened = checkpoints(tmp_path, Late(backend.process, 1, backend.meeting), {"async_save": True})
        opened.save(5, *small_model(seed=1), (0, 0))
        opened.close()
        return opened.finished()

    results = in_processes(2, work)
    assert [saved.step for saved in results[0]] == [5]
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.slow
def test_closing_ends_a_save_that_waits_for_a_process_that_is_gone(tmp_path: Path) -> None:
    opened = checkpoints(tmp_path, Alone(Rank(0, 3)), {"async_save": True}, wait_s=600)
    opened.save(5, *small_model(seed=1), (0, 0))
    began = time.monotonic()
    opened.close()
    assert time.monotonic() - began < 120  # not wait_s
    assert not opened.failed


def test_a_folder_that_the_processes_do_not_share_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> None:
        checkpoints(tmp_path / f"host{backend.process.index}" / "run", backend).find("auto")

    for index in (0, 1):
        (tmp_path / f"host{index}").mkdir()
    results = in_processes(2, work)
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "expected a folder that all processes share, found that process\n  1 doesn't see" in str(results[0])
    assert [names(tmp_path / f"host{index}") for index in (0, 1)] == [[], []]


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_key_that_one_side_lacks_has_its_default_there(tmp_path: Path) -> None:
    """As between two releases, of which one doesn't know the key."""
    save_with(tmp_path)
    default = changed(optim={"betas": list(schema.Optim().betas)})
    assert resumed_with(tmp_path, {}, config=default).changes == ()
    with pytest.raises(CheckpointError, match=r"optim\.betas +\[0\.9, 0\.95\]  \[0\.5, 0\.5\]"):
        resumed_with(tmp_path, {}, config=changed(optim={"betas": [0.5, 0.5]}))
    with pytest.raises(CheckpointError, match=r"optim\.z_loss +null +5\.0"):
        resumed_with(tmp_path, {}, config=changed(optim={"z_loss": 5.0}))


def test_what_fails_on_one_process_before_the_write_is_said_on_all(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> None:
        ours = checkpoints(tmp_path, backend)
        if backend.process.index == 1:
            backend.state = fails  # type: ignore[method-assign]
        ours.save(1, *small_model(seed=1), (0, 0))

    def fails(*_: object) -> NoReturn:
        raise MemoryError("no pinned memory")

    results = in_processes(2, work)
    assert {type(result) for result in results} == {CheckpointError}
    assert "checkpoint of step 1: MemoryError: no pinned memory" in str(results[0])
