"""Several models, optimizers and objects of the user's own in a checkpoint, by name."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_backend import Capture, Log, PlainBackend, checkpoints, in_processes, load, refused, small_model, snapshot
from safetensors.torch import load_file
from torch import nn

from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

VALUES: dict[str, Any] = {
    "counts": {3: 1, "a": 2, (1, 2): None},
    "best": (math.inf, -math.inf, 0.1, 2**70, True, "text: \N{GREEK SMALL LETTER ALPHA}"),
    "nested": [{"mask": torch.tensor([True, False])}, [torch.arange(3, dtype=torch.uint8)], {"__tensor__": "no key"}],
    "numbers": [np.float64(0.5), np.int64(7)],
    "a.b": torch.zeros(2, 0),
    "a": {"b": torch.ones((), dtype=torch.bfloat16)},
}


class Holder:
    """An object with a state, which is replaced by a load."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Loop:
    """Two models, an optimizer of each, and objects, of which the second optimizer is the user's own."""

    def __init__(self, backend: PlainBackend, seed: int, **objects: Any) -> None:
        (first, of_first), (second, of_second) = small_model(seed), small_model(seed + 1)
        self.models, self.optimizers = {"first": first, "second": second}, {"first": of_first, "second": of_second}
        self.objects = {name: Holder(state) for name, state in objects.items()}
        self.backend, backend.optimizers = backend, {of_first: None, of_second: lambda *_: None}

    def save(self, opened: Checkpoints, step: int = 5) -> Path:
        return opened.save(step, self.models, self.optimizers, (0, 0), objects=self.objects)

    def load(self, opened: Checkpoints) -> Resumed:
        point = opened.find("auto")
        assert point is not None
        return opened.load(point, self.models, self.optimizers, self.objects)

    def bits(self) -> list[dict[str, bytes]]:
        return [snapshot(self.models[name], self.optimizers[name]) for name in self.models]


def save_loop(folder: Path, count: int = 1, **objects: Any) -> Path:
    [path, *_] = in_processes(count, lambda plain: Loop(plain, 1, **objects).save(checkpoints(folder, plain)))
    assert isinstance(path, Path), path
    return path


@pytest.mark.parametrize("count", [1, 2])
def test_all_come_back_bit_for_bit(tmp_path: Path, count: int) -> None:
    with checkpoints(tmp_path, plain := PlainBackend()) as opened:
        loop = Loop(plain, 1, values=VALUES, empty={})
        loop.optimizers["second"].param_groups[0] |= {"lr": 0.25, "betas": (0.5, 0.75), "own": torch.tensor([1.0])}
        loop.optimizers["second"].state[loop.models["second"].gate]["kinds"] = {"steps": 3}  # pyright: ignore
        loop.save(opened)
    written = loop.bits()

    def work(backend: PlainBackend) -> Loop:
        other = Loop(backend, 7, values=None, empty=None)
        assert other.load(checkpoints(tmp_path, backend)).step == 5
        return other

    for other in in_processes(count, work):
        assert other.bits() == written
        group = other.optimizers["second"].param_groups[0]
        assert (group["lr"], group["betas"], group["own"].item()) == (0.25, (0.5, 0.75), 1.0)
        assert other.optimizers["second"].state[other.models["second"].gate]["kinds"] == {"steps": 3}
        assert other.optimizers["first"].param_groups[0]["lr"] == 1e-3  # the config's
        assert other.objects["empty"].state == {}
        read = other.objects["values"].state
        for name in ("counts", "best", "numbers"):
            assert read[name] == VALUES[name]
        assert type(read["best"][4]) is bool
        assert read["nested"][2] == VALUES["nested"][2]
        for actual, expected in (
            (read["nested"][0]["mask"], VALUES["nested"][0]["mask"]),
            (read["nested"][1][0], VALUES["nested"][1][0]),
            (read["a.b"], VALUES["a.b"]),
            (read["a"]["b"], VALUES["a"]["b"]),
        ):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"f": [print]}, "values.f.0 is a builtin_function_or_method"),
        ({"a": np.zeros(2)}, "values.a is a ndarray, which a checkpoint can't hold"),
        ({"c": torch.zeros(2, dtype=torch.complex64)}, "objects/values/c: expected a dtype of"),
        ({"t": "\ud800"}, "can't be written as JSON"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path: Path, state: Any, cause: str) -> None:
    opened = checkpoints(tmp_path, plain := PlainBackend())
    with pytest.raises(CheckpointError) as error:
        Loop(plain, 1, values=state).save(opened)
    assert cause in str(error.value)
    assert not list(tmp_path.glob("step-*"))


def fails(_: int) -> Any:
    raise RuntimeError("no state yet")


@pytest.mark.parametrize(
    ("state_on", "cause"),
    [
        (lambda index: {"s": index}, "objects: clock differs between the processes 0 and 1"),
        (lambda index: {"s": torch.tensor(index)}, "objects: clock differs between the processes 0 and 1"),
        (lambda index: {"s": torch.zeros(index)}, "objects: clock differs between the processes 0 and 1"),
        (lambda index: {"s": [0]} if index else {"s": fails}, "clock.s is a function, which a checkpoint can't hold"),
    ],
)
def test_objects_are_equal_on_all_processes(tmp_path: Path, state_on: Any, cause: str) -> None:
    def work(backend: PlainBackend) -> Path:
        return Loop(backend, 1, clock=state_on(backend.process.index)).save(checkpoints(tmp_path, backend))

    assert cause in refused(2, work)
    assert save_loop(tmp_path).is_dir()


class OwnState(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": 1}


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused(tmp_path: Path) -> None:
    model, _ = small_model(1)
    model, optimizer = known(plain := PlainBackend(), model, OwnState(model.parameters()))
    with pytest.raises(CheckpointError, match="OwnState has a state_dict of its own"):
        checkpoints(tmp_path, plain).save(5, model, {"own": optimizer}, (0, 0))


def test_an_optimizer_that_is_not_named_is_told(tmp_path: Path, caplog: Log) -> None:
    loop = Loop(plain := PlainBackend(), 1)
    del loop.optimizers["second"]
    loop.save(checkpoints(tmp_path, plain))
    assert "the state of the AdamW that has second.gate isn't saved" in caplog.text


def known(
    backend: PlainBackend, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same, of an engine that made the optimizer."""
    backend.optimizers[optimizer] = None
    return model, optimizer


def wrong_sets() -> dict[str, Any]:
    def into_adam(loop: Loop) -> None:
        adam = loop.optimizers["second"] = torch.optim.Adam(loop.models["second"].parameters())
        loop.backend.optimizers[adam] = lambda *_: None

    def other(change: Any) -> Any:
        def work(opened: Checkpoints, plain: PlainBackend) -> object:
            loop = Loop(plain, 2, a={})
            change(loop)
            return loop.load(opened)

        return work

    def regroup(loop: Loop) -> None:
        [group] = loop.optimizers["second"].param_groups
        loop.optimizers["second"].param_groups[:] = [
            {**group, "params": group["params"][:1]},
            {**group, "params": group["params"][1:]},
        ]

    return {
        "holds the objects optimizer second, a; this run has optimizer second, a, b": other(
            lambda loop: loop.objects.update(b=Holder({}))
        ),
        "holds the models first, second; this run has first, third": other(
            lambda loop: loop.models.update(third=loop.models.pop("second"))
        ),
        "optimizer second: its groups hold other weights than those saved (4 weights then, 1 + 3 now)": other(regroup),
        "optimizer more: first.gate is in first too": other(
            lambda loop: loop.optimizers.update(more=loop.optimizers["first"])
        ),
        "optimizer second: a weight is of no model that is saved": other(lambda loop: loop.models.pop("second")),
        "objects: a is a dict without state_dict": other(lambda loop: loop.objects.update(a={})),
        "the name 'a b': expected a name": other(lambda loop: loop.objects.update({"a b": Holder({})})),
        "it holds the models first, second; this run has one without a name": lambda opened, plain: load(
            opened, *known(plain, *small_model(3))
        ),
        "optimizer second: it was a AdamW and is a Adam": other(into_adam),
        "optimizer plain: the engine doesn't know it": other(
            lambda loop: loop.optimizers.update(plain=torch.optim.SGD(loop.models["first"].parameters()))
        ),
        "objects: expected a dict by name, found a list": other(lambda loop: setattr(loop, "objects", [Holder({})])),
    }


@pytest.mark.parametrize("cause", wrong_sets())
def test_another_set_is_refused(tmp_path: Path, cause: str) -> None:
    save_loop(tmp_path, a={})
    with pytest.raises(CheckpointError) as error:
        wrong_sets()[cause](checkpoints(tmp_path, plain := PlainBackend()), plain)
    assert cause in str(error.value)


def test_one_model_has_no_prefix_and_a_trainer_starts_from_its_weights(tmp_path: Path) -> None:
    plain, (model, optimizer) = PlainBackend(), small_model(1)
    plain.optimizers = {optimizer: lambda *_: None}
    with checkpoints(tmp_path / "own", plain) as opened:
        path = opened.save(5, {"any": model}, {"any": optimizer}, (0, 0), objects={"a": Holder({"n": 1})})
    other = known(trainer := PlainBackend(), *small_model(2))
    with (
        checkpoints(tmp_path / "own", trainer) as opened,
        pytest.raises(CheckpointError, match="any, a; this run has none"),
    ):
        load(opened, *other)
    with checkpoints(tmp_path / "new", trainer, {"load": "weights_only"}) as opened:
        load(opened, *other, resume=str(path))
    weights = {key for key in snapshot(model, optimizer) if "/" not in key}
    assert {key: snapshot(*other)[key] for key in weights} == {key: snapshot(model, optimizer)[key] for key in weights}


def test_show_lists_names_and_export_writes_one_model(tmp_path: Path, capsys: Capture) -> None:
    path = save_loop(tmp_path / "checkpoints", clock={"s": torch.ones(3)})
    assert main(["show", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"models      first, second", "objects     optimizer.second, clock"} < {*lines}
    assert "  objects/clock/s  float32 [3]" in lines
    assert main(["show", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["named"]["models"] == ["first", "second"]
    target = tmp_path / "second.safetensors"
    assert main(["export", str(tmp_path), str(target), "--format=safetensors", "--model=second"]) == 0
    exported = load_file(target)
    with Reader(path) as reader:
        for key, tensor in exported.items():
            assert torch.equal(tensor, reader.read_whole(f"second.{key}"))
    assert sorted(exported) == ["0.bias", "0.weight", "1.weight", "gate"]
    assert (
        main(["export", str(tmp_path), str(tmp_path / "0.safetensors"), "--format=safetensors", "--model=second.0"])
        == 0
    )
    assert sorted(load_file(tmp_path / "0.safetensors")) == ["bias", "weight"]
    capsys.readouterr()
    for more, cause in ((["--model=third"], "no such model. It has first, second"), ([], "Add --model: first, second")):
        assert main(["export", str(tmp_path), str(tmp_path / "folder"), *more]) == 2
        assert cause in capsys.readouterr().err
    assert Counter(path.name for path in tmp_path.iterdir())["folder"] == 0
