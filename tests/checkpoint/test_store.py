"""Slices in, slices out, bit for bit."""

import itertools
import random
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import xxhash
from plain_backend import PlainBackend, bits, flip_last_byte, named_tensors, save_once, small_model, what_is_written
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from portable_fsdp.backends.contract import Partition, Piece, TensorState
from portable_fsdp.checkpoint.commit import merge
from portable_fsdp.checkpoint.format import DTYPE_BYTES, DataPosition, manifest_text, step_folder
from portable_fsdp.checkpoint.store import Reader, entries_without_pieces, new_manifest, write_pieces
from portable_fsdp.runtime.errors import CheckpointError


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits (NaNs of every kind among the floats); 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, limit, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def whole(tensor: Tensor) -> TensorState:
    """Of a process that holds all of it."""
    return TensorState(tuple(tensor.shape), tensor.dtype, lambda: [Piece((0,) * tensor.dim(), tensor)])


def store(folder: Path, parts: list[dict[str, TensorState]]) -> Path:
    """Write what each process holds, and commit it by hand."""
    for name in ("model", "optimizer"):
        (folder / name).mkdir(parents=True)
    indexes = [write_pieces(folder, *what_is_written(part), index, "") for index, part in enumerate(parts)]
    files, tensors = merge(entries_without_pieces(parts[0]), indexes)
    position = DataPosition(epoch=0, position=0)
    fields = {"step": 1, "config": {}, "model_config": None, "data": position, "ties": {}}
    manifest = new_manifest("d", "b", 1, **fields, files=files, tensors=tensors)
    (folder / "manifest.json").write_text(manifest_text(manifest))
    return folder


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    shapes = {"matrix": (5, 3), "scalar": (), "exp_avg/vector": (7,), "empty": (0, 4), "cube": (2, 3, 4)}
    tensors = {key: random_tensor(shape, getattr(torch, dtype), 1) for key, shape in shapes.items()}
    assert all(tensor.dtype.itemsize == DTYPE_BYTES[dtype] for tensor in tensors.values())
    state = {key: whole(tensor) for key, tensor in tensors.items()}
    with Reader(store(tmp_path / "c", [state])) as reader:
        reader.verify(Partition(0, 1))
        reader.check(state, {})
        for key, tensor in tensors.items():
            actual = reader.read(key, tuple(slice(0, size) for size in tensor.shape))
            assert (actual.dtype, actual.shape, bits(actual)) == (tensor.dtype, tensor.shape, bits(tensor))


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
        with pytest.raises(TypeError, match="expected room for float32"):
            reader.read("w", (slice(0, 2), slice(0, 7)), torch.zeros(7, 2))


def test_only_files_that_hold_the_slice_are_opened(tmp_path: Path) -> None:
    tensor = random_tensor((6, 2), torch.float32, 3)
    pieces = [Piece((i, 0), tensor[i : i + 2]) for i in (0, 2, 4)]
    parts = [{"w": TensorState((6, 2), tensor.dtype, partial(list, [piece]))} for piece in pieces]
    folder = store(tmp_path / "c", parts)
    (folder / "model" / "shard-00002-00.safetensors").unlink()
    with Reader(folder) as reader:
        assert bits(reader.read("w", (slice(0, 4), slice(0, 2)))) == bits(tensor[:4])
        with pytest.raises(CheckpointError, match="found none"):
            reader.read("w", (slice(0, 5), slice(0, 2)))


@pytest.mark.parametrize("slices", [(slice(0, 3),), (slice(0, 7), slice(0, 2)), (slice(-1, 2), slice(0, 2))])
def test_a_slice_outside_the_tensor_is_a_bug(tmp_path: Path, slices: tuple[slice, ...]) -> None:
    state = {"w": whole(torch.zeros(6, 2))}
    with Reader(store(tmp_path / "c", [state])) as reader, pytest.raises(IndexError):
        reader.read("w", slices)


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
    assert str(error.value).splitlines() == [
        "checkpoint step-00000005: expected the tensors of this model, found 12 that differ:",
        "                         this model        checkpoint",
        "    0.weight             float32 [9, 5]    float32 [7, 5]",
        "    0.bias               float32 [9]       float32 [7]",
        "    1.weight             float32 [3, 9]    float32 [3, 7]",
        *(
            f"    {name}/{fqn}".ljust(25) + new.ljust(18) + old
            for fqn, new, old in (
                ("0.weight", "float32 [9, 5]", "float32 [7, 5]"),
                ("0.bias", "float32 [9]", "float32 [7]"),
                ("1.weight", "float32 [3, 9]", "float32 [3, 7]"),
            )
            for name in ("exp_avg", "exp_avg_sq")
        ),
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
    pieces = [Piece((row, 0), tensor[row : row + 1]) for row in range(200)]
    folder = store(
        tmp_path / "c", [{"w": TensorState((200, 3), torch.float32, partial(list, [one]))} for one in pieces]
    )
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Reader(folder) as reader:
        reader.verify(Partition(0, 1))
        for _ in range(2):
            assert bits(reader.read_whole("w")) == bits(tensor)
        assert 10 < len(list(Path("/proc/self/fd").iterdir())) - before < 100
    assert len(list(Path("/proc/self/fd").iterdir())) == before
