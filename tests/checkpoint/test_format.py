"""The manifest, the tiling check, and the commit."""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.checkpoint import commit, format
from portable_fsdp.checkpoint.commit import Index
from portable_fsdp.checkpoint.format import FileEntry, Manifest, TensorEntry
from portable_fsdp.checkpoint.storage import store_of
from portable_fsdp.runtime.errors import CheckpointError

HASH = "0" * 32
WRITTEN_BY = {"device": "cpu", "backend": "plain", "process_count": 1, "torch": "2.9.0", "portable_fsdp": "0.1.0"}

GOLDEN = """{
"format_version": 1,
"step": 7,
"saved_at": "2026-01-02T03:04:05+00:00",
"config": {"optim": {"lr": 0.001}},
"model_config": null,
"data": {"epoch": 1, "position": 20, "rows": null, "tokenizer": null},
"ties": {"v": "w"},
"written_by": {"device": "cpu", "backend": "plain", "process_count": 1, "torch": "2.9.0", "portable_fsdp": "0.1.0"},
"files": [
  {"name": "model/shard-00000-00.safetensors", "bytes": 100, "xxh3_128": "00000000000000000000000000000000"},
  {"name": "model/shard-00001-00.safetensors", "bytes": 100, "xxh3_128": "00000000000000000000000000000000"},
  {"name": "optimizer/shard-00000-00.safetensors", "bytes": 100, "xxh3_128": "00000000000000000000000000000000"}
],
"tensors": {
  "w": {"shape": [3, 2], "dtype": "float32", "files": [0, 1], "offsets": [0, 0, 2, 0], "sizes": [2, 2, 1, 2]},
  "step/w": {"shape": [], "dtype": "float32", "files": [2], "offsets": [], "sizes": []},
  "none": {"shape": [0, 2], "dtype": "bfloat16", "files": [], "offsets": [], "sizes": []}
},
"xxh3_128": "12ddb66e3130c2cc79e1b40f59510c2f"
}
"""


def manifest(tensors: dict[str, TensorEntry], files: list[str], **changes: Any) -> Manifest:
    return Manifest.model_validate(
        {
            "format_version": 1,
            "step": 7,
            "saved_at": "2026-01-02T03:04:05+00:00",
            "config": {"optim": {"lr": 0.001}},
            "model_config": None,
            "data": {"epoch": 1, "position": 20},
            "ties": {},
            "written_by": WRITTEN_BY,
            "files": tuple(FileEntry(name=file, bytes=100, xxh3_128=HASH) for file in files),
            "tensors": tensors,
        }
        | changes
    )


def small() -> Manifest:
    tensors = {
        "w": TensorEntry(shape=(3, 2), dtype="float32", files=[0, 1], offsets=[0, 0, 2, 0], sizes=[2, 2, 1, 2]),
        "step/w": TensorEntry(shape=(), dtype="float32", files=[2]),
        "none": TensorEntry(shape=(0, 2), dtype="bfloat16"),
    }
    files = [f"{name}-00.safetensors" for name in ("model/shard-00000", "model/shard-00001", "optimizer/shard-00000")]
    return manifest(tensors, files, ties={"v": "w"})


def test_a_manifest_is_written_as_people_and_programs_read_it(tmp_path: Path) -> None:
    text = format.manifest_text(small())
    assert text == GOLDEN
    (tmp_path / "manifest.json").write_text(text)
    assert format.read_manifest(tmp_path) == small()


LEFT_OUT = TensorEntry(shape=(3, 2), dtype="bfloat16")
BASE: dict[str, Any] = {"pretrained": "org/name", "gguf_file": None, "fingerprint": HASH}


def test_what_a_base_holds_is_read_back_and_may_be_tied(tmp_path: Path) -> None:
    whole = small().model_copy(
        update={"base": format.BaseFingerprint(**BASE, tensors={"b": LEFT_OUT}), "ties": {"v": "b"}}
    )
    text = format.manifest_text(whole)
    (tmp_path / "manifest.json").write_text(text)
    assert format.read_manifest(tmp_path) == whole
    entry = '  "b": {"shape": [3, 2], "dtype": "bfloat16", "files": [], "offsets": [], "sizes": []}'
    assert f'\n"base": {json.dumps(BASE)[:-1]}, "tensors": {{\n{entry}\n}}}},\n' in text
    assert whole.left_out == {"b": LEFT_OUT}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("w", {}),  # stored too
        ("exp_avg/b", {}),
        ("b", {"files": [0], "offsets": [0, 0], "sizes": [3, 2]}),
        ("b", {"dtype": "bfloat17"}),
        ("b", {"shape": (2**40, 2**40)}),
    ],
)
def test_a_base_of_anything_but_weights_without_pieces_is_refused(key: str, changes: dict[str, Any]) -> None:
    tensors = {key: LEFT_OUT.model_copy(update=changes)}
    wrong = small().model_copy(update={"base": format.BaseFingerprint(**BASE, tensors=tensors)})
    with pytest.raises(CheckpointError, match=rf"manifest.json: {key}: expected "):
        format.check_manifest(wrong, "wrong")


def random_cut(rng: random.Random, shape: tuple[int, ...], offset: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """A box cut in two at random, again and again: tilings that are no grid, too."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not axes or rng.random() < 0.15:
        return [(offset, shape)]
    axis = rng.choice(axes)
    at = rng.randrange(1, shape[axis])
    first = (*shape[:axis], at, *shape[axis + 1 :])
    second = (*shape[:axis], shape[axis] - at, *shape[axis + 1 :])
    moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
    return random_cut(rng, first, offset) + random_cut(rng, second, moved)


def tiled(shape: tuple[int, ...], boxes: Sequence[Sequence[Any]]) -> Manifest:
    offsets, sizes = ([number for box in boxes for number in box[part]] for part in (0, 1))
    tensor = TensorEntry(shape=shape, dtype="int8", files=list(range(len(boxes))), offsets=offsets, sizes=sizes)
    return manifest({"w": tensor}, [f"model/shard-{i:05d}-00.safetensors" for i in range(len(boxes))])


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_pieces_tile_each_tensor_exactly_once(seed: int) -> None:
    for rng in map(random.Random, range(seed, seed + 10)):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(0, 4)))
        boxes = random_cut(rng, shape, (0,) * len(shape))
        rng.shuffle(boxes)
        format.check_manifest(tiled(shape, boxes), "good")
        for _ in range(5 if shape else 0):  # every box moved or resized by one along one axis
            index, axis, part = rng.randrange(len(boxes)), rng.randrange(len(shape)), rng.randrange(2)
            changed = [list(map(list, box)) for box in boxes]
            changed[index][part][axis] += rng.choice((-1, 1))
            if min(changed[index][part]) >= 0:
                with pytest.raises(CheckpointError, match=r"manifest\.json: w: expected|overlap|no tensor uses it"):
                    format.check_manifest(tiled(shape, changed), "bad")


def test_an_overlap_that_a_hole_makes_up_for_is_found() -> None:
    boxes = [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((0, 2), (1, 1))]
    assert sum(a * b for _, (a, b) in boxes) == 9
    with pytest.raises(CheckpointError, match=r"w: the pieces at \[.*\] and \[.*\] overlap"):
        format.check_manifest(tiled((3, 3), boxes), "bad")


def test_the_check_of_many_pieces_is_quick() -> None:
    boxes = [((row, 0), (1, 4)) for row in range(20_000)]
    manifest, began = tiled((20_000, 4), boxes), time.process_time()
    format.check_manifest(manifest, "many")
    assert time.process_time() - began < 5  # pairwise it would take a minute


def test_committed_steps_are_found_newest_first(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000005", "step-100000000", "step-00000020.tmp", "step-20", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000030").touch()
    names = [path.name for path in format.committed_steps(tmp_path)]
    assert names == ["step-100000000", "step-00000010", "step-00000005"]
    assert format.committed_steps(tmp_path / "absent") == []


def test_the_index_files_that_end_the_wait(tmp_path: Path) -> None:
    commit.write_index(tmp_path, Index(attempt="old", process=0))
    with pytest.raises(CheckpointError, match="found none of process 0 after"):
        commit.collect(tmp_path, "new", 1, wait_s=0.01)
    commit.write_index(tmp_path, Index(attempt="new", process=0))
    assert commit.collect(tmp_path, "new", 1, wait_s=0.01) == [Index(attempt="new", process=0)]
    commit.write_index(tmp_path, Index(attempt="new", process=1, error="OSError: No space left on device"))
    with pytest.raises(CheckpointError, match="process 1 could not write: OSError: No space left on device"):
        commit.collect(tmp_path, "new", 2, wait_s=600)
    (tmp_path / "index-00000-new.json").write_text('{"attempt": "new", "process": 0, "unknown": 1}')
    with pytest.raises(CheckpointError, match="expected the index that a process of this run writes"):
        commit.collect(tmp_path, "new", 1, wait_s=600)


def test_announcing_is_the_last_thing_a_process_does_in_the_folder(tmp_path: Path) -> None:
    """As process 0 may rename the folder at once: fifty commits that race with the announcement."""
    for step in range(50):
        final = format.step_folder(tmp_path, step)
        index = Index(attempt=commit.begin(final, "run"), process=0)
        with ThreadPoolExecutor(1) as announcer:
            folder = store_of(final).temporary_of(final, index.attempt)
            announced = announcer.submit(commit.write_index, folder, index)
            while not (folder / f"index-00000-{index.attempt[:8]}.json").exists():
                pass
            folder.rename(final)
            announced.result()


def test_processes_with_different_models_are_refused() -> None:
    known = {"w": TensorEntry(shape=(4,), dtype="float32")}
    other = TensorEntry(shape=(5,), dtype="float32")
    with pytest.raises(CheckpointError, match=r"process 1 wrote w as float32 \[5\], process 0 has it as float32 \[4\]"):
        commit.merge(known, [Index(attempt="a", process=1, tensors={"w": other})])


def test_a_commit_leaves_one_name_and_no_index(tmp_path: Path) -> None:
    final = format.step_folder(tmp_path, 7)
    first = commit.begin(final, "run")
    commit.write_index(store_of(final).temporary_of(final, first), Index(attempt=first, process=0))
    attempt = commit.begin(final, "run")  # starts from an empty folder
    folder = store_of(final).temporary_of(final, attempt)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-00000007.tmp-{attempt[:8]}"] == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == ["attempt.json", "model", "optimizer"]
    index = Index(attempt=attempt, process=0)
    commit.write_index(folder, index)
    with pytest.raises(CheckpointError, match="expected pieces of 4 elements"):  # no reader would take it
        commit.commit(final, attempt, tiled((4,), [((0,), (3,))]), [])
    assert not final.exists()
    for file in small().files:
        (folder / file.name).write_bytes(bytes(file.bytes))
    commit.commit(final, attempt, small(), [index])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "model", "optimizer"]


def test_a_renamed_folder_and_a_newer_format_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000008"
    folder.mkdir()
    (folder / "manifest.json").write_text(GOLDEN)
    with pytest.raises(CheckpointError, match=r"expected step 8 \(the folder's name\), found step 7"):
        format.read_manifest(folder)
    best = folder.rename(tmp_path / "best")
    assert format.read_manifest(best).step == 7
    (best / "manifest.json").write_text(json.dumps({"format_version": 2}))
    with pytest.raises(CheckpointError, match="expected format_version 1, found 2; is it of a newer portable_fsdp"):
        format.read_manifest(best)
