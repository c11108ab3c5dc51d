"""The manifest, the tiling check and the commit; tensors in slices, bit for bit."""

import errno
import itertools
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash
from plain_backend import (
    PlainBackend,
    bits,
    flip_last_byte,
    named_tensors,
    random_tensor,
    save_once,
    small_model,
    what_is_written,
)
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from portable_fsdp.backends.contract import Partition, Piece, TensorState
from portable_fsdp.checkpoint import commit, manifests
from portable_fsdp.checkpoint.commit import Index, merge
from portable_fsdp.checkpoint.manifests import (
    DataPosition,
    FileEntry,
    Manifest,
    TensorEntry,
    manifest_text,
    step_folder,
)
from portable_fsdp.checkpoint.storage import FolderStore, store_of
from portable_fsdp.checkpoint.store import Reader, entries_without_pieces, new_manifest
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


def manifest(tensors: dict[str, TensorEntry], files: list[str], **ties: str) -> Manifest:
    run = {"saved_at": "2026-01-02T03:04:05+00:00", "written_by": WRITTEN_BY, "data": {"epoch": 1, "position": 20}}
    model = {"config": {"optim": {"lr": 0.001}}, "model_config": None, "ties": ties, "tensors": tensors}
    entries = tuple(FileEntry(name=file, bytes=100, xxh3_128=HASH) for file in files)
    return Manifest.model_validate({"format_version": 1, "step": 7, "files": entries} | run | model)


def small() -> Manifest:
    tensors = {
        "w": TensorEntry(shape=(3, 2), dtype="float32", files=[0, 1], offsets=[0, 0, 2, 0], sizes=[2, 2, 1, 2]),
        "step/w": TensorEntry(shape=(), dtype="float32", files=[2]),
        "none": TensorEntry(shape=(0, 2), dtype="bfloat16"),
    }
    files = [f"{name}-00.safetensors" for name in ("model/shard-00000", "model/shard-00001", "optimizer/shard-00000")]
    return manifest(tensors, files, v="w")


def test_a_manifest_is_written_as_people_and_programs_read_it(tmp_path: Path) -> None:
    assert manifests.manifest_text(small()) == GOLDEN
    (tmp_path / "manifest.json").write_text(GOLDEN)
    assert manifests.read_manifest(tmp_path) == small()


def test_a_base_holds_weights_without_pieces_alone_which_may_be_tied(tmp_path: Path) -> None:
    def with_base(key: str, tensor: TensorEntry, **changes: Any) -> Manifest:
        base = manifests.BaseFingerprint(pretrained="org/name", gguf_file=None, fingerprint=HASH, tensors={key: tensor})
        return small().model_copy(update={"base": base, **changes})

    left_out = TensorEntry(shape=(3, 2), dtype="bfloat16")
    whole = with_base("b", left_out, ties={"v": "b"})
    (tmp_path / "manifest.json").write_text(manifests.manifest_text(whole))
    assert manifests.read_manifest(tmp_path) == whole
    assert whole.left_out == {"b": left_out}
    in_pieces: dict[str, Any] = {"files": [0], "offsets": [0, 0], "sizes": [3, 2]}
    for key, changes in (("w", {}), ("exp_avg/b", {}), ("b", in_pieces), ("b", {"dtype": "bfloat17"})):  # w: stored too
        with pytest.raises(CheckpointError, match=rf"manifest.json: {key}: expected "):
            manifests.check_manifest(with_base(key, left_out.model_copy(update=changes)), "wrong")


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


def test_pieces_tile_each_tensor_exactly_once() -> None:
    for rng in map(random.Random, range(60)):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(0, 4)))
        boxes = random_cut(rng, shape, (0,) * len(shape))
        rng.shuffle(boxes)
        manifests.check_manifest(tiled(shape, boxes), "good")
        for _ in range(5 if shape else 0):  # every box moved or resized by one along one axis
            index, axis, part = rng.randrange(len(boxes)), rng.randrange(len(shape)), rng.randrange(2)
            changed = [list(map(list, box)) for box in boxes]
            changed[index][part][axis] += rng.choice((-1, 1))
            if min(changed[index][part]) >= 0:
                with pytest.raises(CheckpointError, match=r"manifest\.json: w: expected|overlap|no tensor uses it"):
                    manifests.check_manifest(tiled(shape, changed), "bad")


def test_the_check_of_many_pieces_is_quick() -> None:
    boxes = [((row, 0), (1, 4)) for row in range(20_000)]
    manifest, began = tiled((20_000, 4), boxes), time.process_time()
    manifests.check_manifest(manifest, "many")
    assert time.process_time() - began < 5  # pairwise it would take a minute


def test_committed_steps_are_found_newest_first(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000005", "step-100000000", "step-00000020.tmp", "step-20", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000030").touch()
    names = [path.name for path in manifests.committed_steps(tmp_path)]
    assert names == ["step-100000000", "step-00000010", "step-00000005"]
    assert manifests.committed_steps(tmp_path / "absent") == []


def test_the_index_files_that_end_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: str, count: int, wait_s: float) -> None:
        with pytest.raises(CheckpointError, match=message):
            commit.collect(tmp_path, "new", count, wait_s)

    commit.write_index(tmp_path, Index(attempt="old", process=0))
    refuse(r"no index file from process 0 \(of 1\) after", 1, 0.01)
    commit.write_index(tmp_path, Index(attempt="new", process=0))
    assert commit.collect(tmp_path, "new", 1, wait_s=0.01) == [Index(attempt="new", process=0)]
    commit.write_index(tmp_path, Index(attempt="new", process=1, error="OSError: No space left on device"))
    refuse("process 1 could not write: OSError: No space left on device", 2, 600)
    (tmp_path / "index-00000-new.json").write_text('{"attempt": "new", "process": 0, "unknown": 1}')
    refuse("not a valid index of this run", 1, 600)
    monkeypatch.setattr(FolderStore, "open", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    refuse(r"no index file from process 0 (.*\n){2}.*error: .*Stale file handle", 1, 0.01)


def test_announcing_is_the_last_thing_a_process_does_in_the_folder(tmp_path: Path) -> None:
    """As process 0 may rename the folder at once: fifty commits that race with the announcement."""
    for step in range(50):
        final = manifests.step_folder(tmp_path, step)
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


# -------------------------------------------------------------------------------------------------------------- tensors


def whole(tensor: Tensor) -> TensorState:
    """Of a process that holds all of it."""
    return TensorState(tuple(tensor.shape), tensor.dtype, lambda: [Piece((0,) * tensor.dim(), tensor)])


def by_rows(tensor: Tensor, rows: int) -> list[dict[str, TensorState]]:
    """The states of several processes, each of which holds `rows` rows."""
    pieces = [Piece((start, 0), tensor[start : start + rows]) for start in range(0, len(tensor), rows)]
    return [{"w": TensorState(tuple(tensor.shape), tensor.dtype, partial(list, [piece]))} for piece in pieces]


def store(folder: Path, parts: list[dict[str, TensorState]]) -> Path:
    """Write what each process holds, and commit it by hand."""
    for name in ("model", "optimizer"):
        (folder / name).mkdir(parents=True)
    indexes = [what_is_written(part).write(folder, index, "") for index, part in enumerate(parts)]
    files, tensors = merge(entries_without_pieces(parts[0]), indexes)
    position = DataPosition(epoch=0, position=0)
    fields = {"step": 1, "config": {}, "model_config": None, "data": position, "ties": {}}
    manifest = new_manifest("d", "b", 1, **fields, files=files, tensors=tensors)
    (folder / "manifest.json").write_text(manifest_text(manifest))
    return folder


def test_slices_are_assembled_from_pieces_of_any_cut(tmp_path: Path) -> None:
    rng = random.Random(0)
    tensor = random_tensor((11, 7), torch.float32, 2)
    rows, columns = [0, 4, 5, 11], [0, 3, 7]
    pieces = [
        Piece((a, c), tensor[a:b, c:d]) for a, b in itertools.pairwise(rows) for c, d in itertools.pairwise(columns)
    ]
    rng.shuffle(pieces)
    parts = [{"w": TensorState((11, 7), tensor.dtype, partial(list, pieces[i::3]))} for i in range(3)]
    with Reader(store(tmp_path / "c", parts)) as reader:
        for _ in range(200):
            a, b = sorted(rng.choices(range(12), k=2))
            c, d = sorted(rng.choices(range(8), k=2))
            actual = reader.read("w", (slice(a, b), slice(c, d)))
            assert actual.shape == (b - a, d - c)
            assert bits(actual) == bits(tensor[a:b, c:d])
            around = torch.zeros(11, 7)
            assert reader.read("w", (slice(a, b), slice(c, d)), around[a:b, c:d]).shape == actual.shape
            assert bits(around[a:b, c:d]) == bits(actual)
            assert around.count_nonzero() == actual.count_nonzero()
        with pytest.raises(TypeError, match="expected a buffer of float32"):
            reader.read("w", (slice(0, 2), slice(0, 7)), torch.zeros(7, 2))


def test_only_files_that_hold_the_slice_are_opened(tmp_path: Path) -> None:
    tensor = random_tensor((6, 2), torch.float32, 3)
    folder = store(tmp_path / "c", by_rows(tensor, 2))
    (folder / "model" / "shard-00002-00.safetensors").unlink()
    with Reader(folder) as reader:
        assert bits(reader.read("w", (slice(0, 4), slice(0, 2)))) == bits(tensor[:4])
        with pytest.raises(CheckpointError, match="no such file"):
            reader.read("w", (slice(0, 5), slice(0, 2)))


# torch says so whenever it loads without a process group, which is what `no_dist=True` asks for.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_dcp_opens_the_model_folder(tmp_path: Path) -> None:
    path = save_once(tmp_path, seed=4, count=3, devices=2)
    expected = {k: t for k, t in named_tensors(*small_model(seed=4)).items() if "/" not in k}
    actual = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    load(actual, storage_reader=HuggingFaceStorageReader(str(path / "model")), no_dist=True)
    assert {key: bits(tensor) for key, tensor in actual.items()} == {key: bits(t) for key, t in expected.items()}


def test_the_shares_of_all_processes_are_all_files(tmp_path: Path) -> None:
    def raises(part: Partition, folder: str = "") -> bool:
        try:
            with Reader(path) as reader:
                reader.verify(part, folder)
        except CheckpointError:
            return True
        return False

    path = save_once(tmp_path, count=2, devices=2)
    files = sorted(p.relative_to(path) for p in path.rglob("*.safetensors"))
    assert len(files) == 8
    with Reader(path) as reader:  # other programs compute it too
        for entry in reader.manifest.files:
            assert entry.xxh3_128 == xxhash.xxh3_128((path / entry.name).read_bytes()).hexdigest()
    for file in files:
        flip_last_byte(path / file)
        assert sum(raises(Partition(index, 3)) for index in range(3)) == 1
        assert raises(Partition(0, 1), "model/") == (file.parts[0] == "model")
        flip_last_byte(path / file)
    assert not raises(Partition(0, 1))


def test_what_differs_from_this_model_is_a_table(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    model, optimizer = small_model(seed=1, hidden=9)
    state = PlainBackend().state(model, optimizer)
    state["new.weight"] = state.pop("gate")
    with Reader(path) as reader, pytest.raises(CheckpointError) as error:
        reader.check(state, {"tied": "1.weight"})
    lines = str(error.value).splitlines()
    assert len(lines) == 16
    assert lines[:3] + lines[-5:] == [
        "checkpoint step-00000005: 12 tensors differ from those of this model:",
        "                         this model        checkpoint",
        "    0.weight             float32 [9, 5]    float32 [7, 5]",
        "    new.weight           bfloat16 [2]      nothing",
        "    tied                 tied to 1.weight  nothing",
        "    gate                 nothing           bfloat16 [2]",
        "  Resume with the config of the run that saved it",
        f"  (python -m portable_fsdp.checkpoint show --config {path}), or train in another run.dir.",
    ]


def test_another_dtype_is_another_model_and_some_cannot_be_stored(tmp_path: Path) -> None:
    path = save_once(tmp_path)
    state = PlainBackend().state(*small_model(seed=1))
    state["gate"] = TensorState((2,), torch.float16)
    with Reader(path) as reader, pytest.raises(CheckpointError, match=r"gate +float16 \[2\] +bfloat16 \[2\]"):
        reader.check(state, {})
    with pytest.raises(CheckpointError, match="found complex64"):
        entries_without_pieces({"w": whole(torch.zeros(2, dtype=torch.complex64))})


def test_views_are_written_as_they_look_in_files_as_readable_as_their_folder(tmp_path: Path) -> None:
    tensor = random_tensor((4, 6), torch.float32, 5)
    path = store(step_folder(tmp_path, 1), [{"w": whole(tensor.T)}])
    with Reader(path) as reader:
        assert bits(reader.read("w", (slice(0, 6), slice(0, 4)))) == bits(tensor.T)
    shard = path / "model" / "shard-00000-00.safetensors"
    assert shard.stat().st_mode & 0o777 == shard.parent.stat().st_mode & 0o666


def test_the_example_reads_with_neither_torch_nor_this_package(tmp_path: Path) -> None:
    path = save_once(tmp_path, seed=4, count=2, devices=2)
    file = Path(__file__).parents[2] / "examples" / "read_checkpoint.py"
    example = runpy.run_path(str(file))
    for key, tensor in named_tensors(*small_model(seed=4)).items():
        array = example["read_tensor"](path, key)
        assert array.tobytes() == bits(tensor)
        assert array.shape == (tuple(tensor.shape) if tensor.dtype == torch.float32 else (*tensor.shape, 2))
    program = (
        f"import runpy, sys; runpy.run_path({str(file)!r}); "
        "sys.exit(any(n.split('.')[0] in ('torch', 'portable_fsdp') for n in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_few_files_are_open_at_a_time_however_many_there_are(tmp_path: Path) -> None:
    """A process may often open 1,024; a checkpoint of 512 processes has as many."""
    tensor = random_tensor((200, 3), torch.float32, 6)
    folder = store(tmp_path / "c", by_rows(tensor, 1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Reader(folder) as reader:
        reader.verify(Partition(0, 1))
        for _ in range(2):
            assert bits(reader.read_whole("w")) == bits(tensor)
        assert 10 < len(list(Path("/proc/self/fd").iterdir())) - before < 100
    assert len(list(Path("/proc/self/fd").iterdir())) == before
