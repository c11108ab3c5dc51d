"""Saving and loading, with one and with several processes; replicas that must be equal."""

import json
import logging
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plain_backend import (
    Log,
    Patch,
    PlainBackend,
    checkpoints,
    in_processes,
    load,
    named_tensors,
    names,
    refused,
    save_once,
    small_model,
    snapshot,
    what_is_written,
)

from portable_fsdp.backends.contract import Partition, Piece, TensorState
from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint import snapshot as snapshot_module
from portable_fsdp.checkpoint.manager import Checkpoints, Fingerprint, Resumed, Saved
from portable_fsdp.checkpoint.manifests import step_folder
from portable_fsdp.checkpoint.resume import Difference
from portable_fsdp.checkpoint.snapshot import Snapshot, sum_of_bits
from portable_fsdp.checkpoint.storage import store_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config import schema
from portable_fsdp.runtime.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.slow

State = dict[str, TensorState]


def save(opened: Checkpoints, step: int, seed: int = 1) -> Path:
    return opened.save(step, *small_model(seed), (0, 0))


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


# ---------------------------------------------------------------------------------------------- saves that are refused


def has_another_dtype(state: State) -> None:
    state["0.weight"] = replace(state["0.weight"], pieces=lambda: [Piece((4, 0), torch.zeros(4, 5).double())])


def lacks_a_piece(state: State) -> None:
    pieces = state["1.weight"].pieces()[1:]
    state["1.weight"] = replace(state["1.weight"], pieces=lambda: pieces)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (has_another_dtype, "process 2 could not write: TypeError: 0.weight"),
        (lacks_a_piece, "1.weight: expected pieces of 21 elements in total, found "),
        (Mock(side_effect=MemoryError("no pinned memory")), "checkpoint of step 5: MemoryError: no pinned memory"),
    ],
)
def test_what_fails_on_one_process_fails_the_save_of_all(tmp_path: Path, change: Any, message: str) -> None:
    def work(backend: PlainBackend) -> None:
        if backend.process.index == 2:
            backend.change = change
        save(checkpoints(tmp_path, backend), 5)

    assert message in refused(3, work)
    assert names(tmp_path) == []


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    before = (path / "manifest.json").read_bytes()
    assert "already committed in" in refused(2, lambda backend: save(checkpoints(tmp_path, backend), 5, seed=2))
    assert (path / "manifest.json").read_bytes() == before
    assert names(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), os.fsdecode(b"runs/\xff")])
def test_a_config_that_json_does_not_round_trip_is_refused_when_the_run_opens(tmp_path: Path, value: Any) -> None:
    for config, model_config in (({"run": {"dir": value}}, None), ({}, {"limit": [0.0, value]})):
        with pytest.raises(CheckpointError, match=r"config: can't be written as JSON: "):
            checkpoints(tmp_path, PlainBackend(), config=config, model_config=model_config)


# -------------------------------------------------------------------------------------------------------------- debris


def test_the_first_save_removes_its_own_debris_and_nothing_else(tmp_path: Path, caplog: Log) -> None:
    save_once(tmp_path)
    for step, run in ((6, ""), (8, "another")):
        folder = tmp_path / f"step-0000000{step}.tmp-0a1b2c3d"
        (folder / "model").mkdir(parents=True)
        (folder / "attempt.json").write_text(json.dumps({"run": run, "attempt": "x"}))
    (tmp_path / "step-00000009.tmp-0a1b2c3d").mkdir()  # killed before its mark: nothing is lost with it
    (tmp_path / "step-00000007.tmp-0a1b2c3d").mkdir()  # not ours: no attempt of ours has files and no mark
    (tmp_path / "step-00000007.tmp-0a1b2c3d" / "notes").touch()
    (tmp_path / "notes.tmp").touch()
    (tmp_path / "step-00000004.damaged-1").mkdir()
    opened = checkpoints(tmp_path, PlainBackend())
    opened.find("auto")
    assert (tmp_path / "step-00000006.tmp-0a1b2c3d" / "model").is_dir()  # a refused start changes nothing
    save(opened, 7)
    left = ["notes.tmp", "step-00000004.damaged-1", "step-00000005", "step-00000007"]
    assert names(tmp_path) == [*left, "step-00000007.tmp-0a1b2c3d", "step-00000008.tmp-0a1b2c3d"]
    save(opened, 8)
    assert "another run may be saving there: step-00000008.tmp-0a1b2c3d belongs to run 'another'" in caplog.text
    assert (tmp_path / "step-00000008.tmp-0a1b2c3d").is_dir()


def test_a_straggler_of_an_earlier_attempt_does_no_harm(place: Path) -> None:
    """Process 1 of a killed attempt still writes while the next attempt saves the same step, and after its commit. Its
    folder is gone; in a store its files have other names."""
    straggler, final = PlainBackend(Partition(1, 2)), step_folder(place, 5)
    old, attempt = checkpoints(place, straggler), commit.begin(final, "")
    part = what_is_written(straggler.state(*small_model(seed=4)))

    def straggle(_: State) -> None:
        with pytest.raises(FileNotFoundError) if store_of(place).is_local else nullcontext():
            old._write_part(final, attempt, part)

    def work(backend: PlainBackend) -> Path:
        backend.change = straggle  # the next attempt has begun
        return save(checkpoints(place, backend), 5, seed=5)

    assert in_processes(2, work) == [final] * 2
    straggle({})
    model, optimizer = small_model(seed=9)
    load(checkpoints(place, PlainBackend()), model, optimizer)
    assert snapshot(model, optimizer) == snapshot(*small_model(seed=5))
    assert store_of(place).names(place) == ["step-00000005"]


# ---------------------------------------------------------------------------------------------------- another config


CONFIG = {"run": {"name": "a", "seed": 1}, "optim": {"lr": 0.1, "eps": 1}, "train": {"steps": 9, "micro_batch": 2}}
RATES = {"model_type": "opt", "dropout": 0.1}
NO_RATES = {"model_type": "llama", "attention_dropout": 0.0}
DATA = Fingerprint("r", "t")


def changed(**changes: Any) -> dict[str, Any]:
    return {section: {**CONFIG.get(section, {}), **changes.get(section, {})} for section in CONFIG | changes}


def save_with(folder: Path, config: dict[str, Any] = CONFIG, model_config: dict[str, Any] | None = None) -> Path:
    opened = checkpoints(folder, PlainBackend(), config=config, model_config=model_config, data=DATA)
    return opened.save(5, *small_model(seed=1), (0, 20))


def resumed_with(
    folder: Path, config: dict[str, Any] = CONFIG, allow: tuple[str, ...] = (), data: Fingerprint = DATA
) -> Resumed:
    return load(checkpoints(folder, PlainBackend(), {"allow": allow}, config=config, data=data), *small_model(seed=2))


LONG = "/storage/of/the/team/that/pays/for/it/corpora/" * 2


def test_a_long_value_is_cut_before_the_difference() -> None:
    saved = {"hidden_size": 64, "model_type": "llama", "rope": {"theta": 1e4, "x": 1}, "vocab": 8}
    now = {"hidden_size": 64, "model_type": "llama", "rope": {"theta": 1e5, "x": 1}}
    for before, after, rows in (
        (saved, now, ["k.rope.theta: 10000.0, now 100000.0", "k.vocab: 8, now null"]),
        (f"{LONG}a.jsonl", f"{LONG}b.jsonl", [f'k: ...{LONG[-30:]}a.jsonl", now ...{LONG[-30:]}b.jsonl"']),
        ("short", LONG, [f'k: "short", now "{LONG[:56]}...']),
    ):
        assert Difference("k", before, after, True).lines() == rows


CURVE = changed(optim={"lr": 0.2}, train={"steps": 18, "micro_batch": 1})
OLD, MOVED = changed(data={"path": "old"}), changed(data={"path": "new"})
OTHER_ROWS = Fingerprint("other", "t")


# What the checkpoint has and what the run, what the run allows, and the error or the changes of the resumed run.
CONFIGS: list[tuple[dict[str, Any], dict[str, Any], Fingerprint, tuple[str, ...], str | list[str]]] = [
    ({}, {}, DATA, (), []),  # a loop without a config resumes its own
    ({}, CONFIG, DATA, (), r"unknown \(imported\)"),
    (CONFIG, CURVE, DATA, ("optim",), r"allow='\[train\.steps\]'"),
    (
        *(CONFIG, CURVE, DATA, ("optim", "train.steps")),
        ["optim.lr: 0.1, now 0.2", "train.steps: 9, now 18", "train.micro_batch: 2, now 1"],
    ),
    # Another path to the same data.
    (OLD, MOVED, DATA, (), []),
    (OLD, MOVED, Fingerprint(), (), r"data\.path"),
    (OLD, MOVED, OTHER_ROWS, (), r'data\.rows +"r" +"other"'),
    (OLD, MOVED, OTHER_ROWS, ("data",), ['data.path: "old", now "new"', 'data.rows: "r", now "other"']),
    # A key that one side lacks has its default there, as between two releases, of which one doesn't know the key.
    (CONFIG, changed(optim={"betas": list(schema.Optim().betas)}), DATA, (), []),
    (CONFIG, changed(optim={"betas": [0.5, 0.5]}), DATA, (), r"optim\.betas +\[0\.9, 0\.95\]  \[0\.5, 0\.5\]"),
    (CONFIG, changed(optim={"z_loss": 5.0}), DATA, (), r"optim\.z_loss +null +5\.0"),
]


@pytest.mark.parametrize("row", CONFIGS)
def test_another_config_is_refused_unless_it_is_allowed(tmp_path: Path, row: Any) -> None:
    saved, now, data, allow, outcome = row
    save_with(tmp_path, saved)
    with pytest.raises(CheckpointError, match=outcome) if isinstance(outcome, str) else nullcontext():
        resumed = resumed_with(tmp_path, now, allow, data)
        assert (resumed.step, [str(change) for change in resumed.changes]) == (5, outcome)
        assert [change.name for change in resumed.changes if not change.makes_curve] in ([], ["train.micro_batch"])


def test_another_curve_is_refused_with_a_table(tmp_path: Path) -> None:
    save_with(tmp_path)
    with pytest.raises(CheckpointError) as error:
        resumed_with(tmp_path, CURVE)
    assert str(error.value).splitlines() == [
        "checkpoint step-00000005: the config differs from that of the run that saved it:",
        "                 saved  now",
        "    optim.lr     0.1    0.2",
        "    train.steps  9      18",
        "  To resume with these changes: checkpoint.allow='[optim.lr, train.steps]'.",
        "  To start a new run from its weights: checkpoint.load=weights_only",
        "  checkpoint.resume=FOLDER run.dir=ANOTHER.",
    ]
    with pytest.raises(ConfigError, match=r"checkpoint\.allow: expected names .* found optim\.rate, sharding"):
        resumed_with(tmp_path, allow=("optim.lr", "optim.rate", "sharding"))


DROPOUTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, RATES, "off"),  # an older release
    ({"dropout": 0.0}, {"dropout": None}, RATES, "off"),
    ({}, {}, NO_RATES, "same"),
    ({"dropout": None}, {"dropout": "published"}, RATES, "same"),
    ({}, {"dropout": "published"}, RATES, '0.0, now "published"'),
    ({"dropout": None}, {"dropout": 0.0}, RATES, '"published", now 0.0'),
    ({"dropout": 0.2}, {"dropout": None}, RATES, '0.2, now "published"'),
]


@pytest.mark.parametrize("row", DROPOUTS)
def test_another_dropout_is_refused_and_a_run_without_it_goes_on_so(tmp_path: Path, row: Any) -> None:
    saved, now, architecture, outcome = row
    before, config = (changed(model={"pretrained": "folder", **keys}) for keys in (saved, now))
    save_with(tmp_path, before, architecture)
    if "now" not in outcome:
        assert resumed_with(tmp_path, config).drops_nothing is (outcome == "off")
        return
    with pytest.raises(CheckpointError, match=r"checkpoint\.allow='\[model\.dropout\]'"):
        resumed_with(tmp_path, config)
    resumed = resumed_with(tmp_path, config, ("model.dropout",))
    assert [str(change) for change in resumed.changes] == [f"model.dropout: {outcome}"]


def test_weights_only_starts_anew_from_other_weights(tmp_path: Path) -> None:
    """tests/checkpoint/test_search.py resumes such a run by the same command."""
    path = save_with(tmp_path / "first")
    model, optimizer = small_model(seed=2)
    opened = checkpoints(tmp_path / "second", PlainBackend(), {"load": "weights_only"}, config=changed(optim={"lr": 3}))
    resumed = load(opened, model, optimizer, str(path))
    assert (resumed.step, resumed.position, resumed.weights_only) == (0, (0, 0), True)
    actual, expected = snapshot(model, optimizer), snapshot(*small_model(seed=1))
    assert all(actual[key] == (expected[key] if "/" not in key else bytes(len(expected[key]))) for key in actual)


# ------------------------------------------------------------------------------------------------------ background


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> None:
        opened = checkpoints(tmp_path, backend, {"async_save": True})
        model, optimizer = small_model(seed=1)
        expected: dict[int, dict[str, bytes]] = {}
        for step in (1, 2, 3):
            expected[step] = snapshot(model, optimizer)
            opened.save(step, model, optimizer, (0, 0))
            for tensor in named_tensors(model, optimizer).values():
                tensor.add_(1)  # the next step runs while the files are written
        opened.wait()
        for step, state in expected.items():
            with Reader(step_folder(tmp_path, step)) as reader:
                backend.load_state(model, optimizer, reader.read)
            if snapshot(model, optimizer) != state:
                raise ValueError(f"step {step} has another state")

    assert in_processes(2, work) == [None, None]


def test_background_saves_reuse_their_buffers() -> None:
    state = PlainBackend().state(*small_model(seed=1))
    snapshots = Snapshot()
    first, second = (snapshots.take((key, tensor.pieces()) for key, tensor in state.items()) for _ in range(2))
    for key, tensor in state.items():
        for mine, before, piece in zip(first[key], second[key], tensor.pieces(), strict=True):
            assert mine.data.data_ptr() == before.data.data_ptr() != piece.data.data_ptr()


def test_closing_lets_a_save_commit_whose_other_process_is_a_moment_late(tmp_path: Path) -> None:
    def work(backend: PlainBackend) -> list[Saved]:
        backend.change = lambda _: time.sleep(0.5 * backend.process.index)
        opened = checkpoints(tmp_path, backend, {"async_save": True})
        save(opened, 5)
        opened.close()
        return opened.finished()

    assert [saved.step for saved in in_processes(2, work)[0]] == [5]
    assert names(tmp_path) == ["step-00000005"]


def test_closing_ends_a_save_that_waits_for_a_process_that_is_gone(tmp_path: Path, monkeypatch: Patch) -> None:
    alone = PlainBackend(Partition(0, 3))
    monkeypatch.setattr(alone, "gather", lambda value: [value])
    opened = checkpoints(tmp_path, alone, {"async_save": True}, wait_s=600)
    save(opened, 5)
    began = time.monotonic()
    opened.close()
    assert time.monotonic() - began < 120  # not wait_s
    assert not opened.failed


# ------------------------------------------------------------------------------------------------------------- replicas


def save_unequal(folder: Path, changes: dict[int, tuple[str, ...]], count: int, settings: dict[str, Any]) -> list[Any]:
    """Step 6 of `count` processes that hold all of each tensor, of which some have one other number in some tensors;
    then step 7, of equal ones. Process 0 writes."""

    def work(backend: PlainBackend) -> Any:
        model, optimizer = small_model(seed=2)
        live, index = named_tensors(model, optimizer), backend.process.index
        before = {key: tensor.clone() for key, tensor in live.items()}

        def replicate(state: State) -> None:
            for key, tensor in live.items():
                piece = Piece((0,) * tensor.dim(), tensor, index)
                state[key] = replace(state[key], pieces=lambda piece=piece: [piece])

        backend.change, opened = replicate, checkpoints(folder, backend, settings)
        for key in changes.get(index, ()):
            live[key].view(-1)[-1] += 0.5
        try:
            opened.save(6, model, optimizer, (1, 20))
            for tensor in live.values():
                tensor += 1  # the next step: a background save must not see it
            opened.wait()
        finally:
            for key, tensor in live.items():
                tensor.copy_(before[key])
            opened.save(7, model, optimizer, (1, 20))
            opened.wait()

    return in_processes(count, work)


OF_TWO = (
    "replicas differ in 2 places:\n                  equal values in\n"
    "    0.weight      process 0, process 1 | process 2\n"
    "    exp_avg/gate  process 0, process 1 | process 2\n"
)
REPLICAS: dict[str, tuple[dict[int, tuple[str, ...]], int, list[str]]] = {
    "equal": ({}, 3, []),
    "one_of_two": (
        *({1: ("0.weight",)}, 2),
        ["    0.weight  process 0 | process 1", "step-00000005. If it happens again, test"],
    ),
    "two_tensors": ({2: ("0.weight", "exp_avg/gate")}, 3, [OF_TWO]),
    "the_writer": ({0: ("step/0.bias",)}, 3, ["    step/0.bias  process 0 | process 1, process 2"]),
    "all": ({1: ("gate",), 2: ("gate", "gate")}, 3, ["    gate  process 0 | process 1 | process 2"]),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("row", REPLICAS)
def test_replicas_that_differ_are_refused_by_name_on_all_processes(tmp_path: Path, row: str, is_async: bool) -> None:
    changes, count, lines = REPLICAS[row]
    save_once(tmp_path, step=5)
    results = save_unequal(tmp_path, changes, count, {"async_save": is_async})
    assert {type(result) for result in results} == {CheckpointError if changes else type(None)}, results
    assert len({str(result) for result in results}) == 1
    for line in lines:
        assert line in str(results[0])
    assert names(tmp_path) == [f"step-0000000{step}" for step in (5, 6, 7) if step != 6 or not changes]


def test_replicas_that_differ_are_saved_by_name(tmp_path: Path, caplog: Log) -> None:
    caplog.set_level(logging.WARNING)
    assert save_unequal(tmp_path, {1: ("0.weight",)}, 2, {"allow": ["replicas"]}) == [None, None]
    assert "step-00000006: replicas differ in 1 places; saving the first:\n" in caplog.text
    assert "0.weight  process 0 | process 1" in caplog.text
    model, optimizer = small_model(seed=9)
    load(checkpoints(tmp_path / "another", PlainBackend()), model, optimizer, str(tmp_path / "step-00000006"))
    assert snapshot(model, optimizer) == snapshot(*small_model(seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [1, 3, 4, 1000])
def test_a_sum_of_bits_tells_any_bit_and_any_place(monkeypatch: Patch, dtype: torch.dtype, count: int) -> None:
    """What digests of tensors on a device are made of."""
    monkeypatch.setattr(snapshot_module, "_ELEMENTS", 128)  # at a time
    generator = torch.Generator().manual_seed(count)
    tensor = torch.randint(0, 2, (count,), generator=generator).to(dtype)
    sums = {int(sum_of_bits(tensor))}
    assert sums == {int(sum_of_bits(torch.cat([tensor[:1], tensor])[1:]))}, "wherever it lies"
    bits = tensor.view(torch.uint8)
    places = {0, len(bits) - 1, *torch.randint(0, len(bits), (3,), generator=generator).tolist()}
    for place in places:
        bits[place] ^= 1
        sums.add(int(sum_of_bits(tensor)))
        bits[place] ^= 1
    assert len(sums) == 1 + len(places)
    if count == 1000:
        assert int(sum_of_bits(tensor.flip(0))) not in sums
