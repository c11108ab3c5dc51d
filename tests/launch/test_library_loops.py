"""Training loops of users: the examples, as people start them, against plain PyTorch."""

import copy
import functools
import os
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cli import FAKE_LAUNCHERS, ROOT, TINY, TORCHRUN, finish, two_tasks
from documented import blocks, commands
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import portable_fsdp as pf
from portable_fsdp.checkpoint.__main__ import main, resolve
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.load import config_text
from portable_fsdp.models.factory import open_factory
from portable_fsdp.models.loss import cross_entropy_sum
from portable_fsdp.runtime.errors import BackendError, ConfigError

PYTHON = Path(sys.executable)


def printed(what: str, out: str) -> list[float]:
    return [float(number) for number in re.findall(rf": {what} (\S+)$", out, re.MULTILINE)]


def plain_losses(example: dict[str, Any]) -> list[float]:
    """AdamW by hand on one device: the mean over the whole batch, decay on matrices, cosine to a tenth."""
    module, fill = open_factory("test", example["Autoencoder"], 0, torch.float32)
    weights = {fqn: fill(fqn, tuple(slice(0, size) for size in p.shape)) for fqn, p in module.named_parameters()}
    model: nn.Module = example["Autoencoder"]()
    model.load_state_dict(weights)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    losses: list[float] = []
    for step in range(1, 201):
        batch: dict[str, Tensor] = example["rows"](step, 0, 1)
        total, count = example["error"](model, batch)
        loss = total / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = pf.learning_rate(pf.make_config(optim={"lr": 3e-3}).optim, step, 200)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[49::50]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ([PYTHON], ["native"]),
        pytest.param([*TORCHRUN[:-2]], ["native"], marks=pytest.mark.proof),
        pytest.param([PYTHON], ["xla", "3"], marks=[pytest.mark.proof, pytest.mark.xla]),
    ],
    ids=["one", "torchrun", "xla"],
)
def test_rows_of_ones_own_train_as_in_plain_pytorch(start: list[str | Path], words: list[str], tmp_path: Path) -> None:
    """The config has no batch, dataset or loss."""
    script = ROOT / "examples/own_rows.py"
    run = finish([*start, script, "cpu", *words], tmp_path)
    assert printed("error", run.out) == pytest.approx(plain_losses(runpy.run_path(str(script))), rel=1e-4)
    assert re.findall(r"^step (\d+): ", run.out, re.MULTILINE) == ["50", "100", "150", "200"]
    assert (tmp_path / "runs/own_rows/step-00000200").is_dir(), list((tmp_path / "runs/own_rows").iterdir())


@pytest.mark.slow
def test_a_loop_of_accelerate_changes_one_import_and_learns_the_same(tmp_path: Path) -> None:
    theirs, ours = (
        (ROOT / f"examples/{name}_loop.py").read_text().splitlines()[1:] for name in ("accelerate", "ported")
    )
    assert [line for line in theirs if line not in ours] == ["from accelerate import Accelerator"]
    assert [line for line in ours if line not in theirs] == ["from portable_fsdp import Accelerator"]
    scripts = [ROOT / f"examples/{name}_loop.py" for name in ("accelerate", "ported")]
    theirs, ours = (
        finish([PYTHON, script], tmp_path, USE_TORCH_XLA="0", PORTABLE_FSDP="device=cpu") for script in scripts
    )
    assert printed("accuracy", ours.out) == printed("accuracy", theirs.out)
    assert printed("accuracy", ours.out)[-1] > 0.95


@pytest.mark.proof
@pytest.mark.parametrize("start", [[PYTHON], [*TORCHRUN[:-2]]], ids=["xla", "torchrun"])
def test_the_ported_loop_learns_on_several_devices_and_its_checkpoint_opens(
    start: list[str | Path], tmp_path: Path
) -> None:
    variable = "device=cpu" if len(start) > 1 else "device=cpu backend=xla num_devices=2"
    run = finish([*start, ROOT / "examples/ported_loop.py"], tmp_path, PORTABLE_FSDP=variable)
    assert printed("accuracy", run.out)[-1] > 0.95
    assert resolve(tmp_path / "runs/accelerate_loop").name == "step-00000126"  # 84 batches an epoch, two of them a step


PLACES = {
    "native x 2": ([*TORCHRUN[:-2]], "device=cpu"),
    "xla x 4": ([PYTHON], "device=cpu backend=xla num_devices=4"),
    "native": ([PYTHON], "device=cpu backend=native num_devices=1"),
}
FILES = {"ema": "ema/model.safetensors", "gan": "gan/step-00000030", "lora": "lora/adapter_model.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name, place, marks=[pytest.mark.proof] * ((name, place) not in (("ema", "native x 2"), ("lora", "xla x 4")))
        )
        for name in FILES
        for place in PLACES
    ],
)
def test_a_script_of_accelerate_has_its_losses_by_one_changed_line(name: str, place: str, tmp_path: Path) -> None:
    script, (start, variable) = ROOT / f"examples/accelerator_{name}.py", PLACES[place]
    text, changed = script.read_text(), "from portable_fsdp import Accelerator\n"
    assert text.count("portable_fsdp") == text.count(changed) == 1
    assert text.count("\n") <= 40
    (theirs := tmp_path / "theirs.py").write_text(text.replace(changed, "from accelerate import Accelerator\n"))
    variables = {"USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    expected = printed("loss", finish([PYTHON, theirs], tmp_path, **variables).out)
    assert len(expected) == 3
    (folder := tmp_path / "ours").mkdir()
    run = finish([*start, script], folder, PORTABLE_FSDP=variable)
    assert printed("loss", run.out) == pytest.approx(expected, rel=1e-5)
    if name == "gan":
        assert (folder / "runs" / FILES[name]).is_dir()
        return
    with (
        safe_open(folder / "runs" / FILES[name], "pt") as own,
        safe_open(tmp_path / "runs" / FILES[name], "pt") as saved,
    ):
        assert {*own.keys()} == {*saved.keys()}
        for key in {*saved.keys()}:
            torch.testing.assert_close(own.get_tensor(key), saved.get_tensor(key), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "count"),
    [(1, 2), *(pytest.param(pair, 3, marks=[pytest.mark.proof, pytest.mark.xla]) for pair in (0, 1))],
)
def test_a_loop_on_fsdp_and_ours_have_the_same_losses_and_its_checkpoint_opens(
    pair: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of docs/from_fsdp.md: theirs, ours on native, ours on XLA; its blocks of Python."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    *pairs, imports = [[*commands(f"```bash\n{text}```", "")] for text in blocks("docs/from_fsdp.md", "bash")]
    theirs, *ours = (
        printed("loss", finish([PYTHON.with_name(words[0]), *words[1:]], tmp_path).out)
        for words in (command.words for command in pairs[pair][:count])
    )
    assert len(theirs) == 3
    assert ours == [pytest.approx(theirs, rel=1e-5)] * (count - 1)
    monkeypatch.chdir(tmp_path)
    assert main(imports[pair].words[3:]) == 0
    saved = Path("runs", f"from_fsdp{pair + 1}_native/step-00000030")
    with Reader(resolve(Path(imports[pair].words[5]))) as imported, Reader(saved) as own:
        assert imported.manifest.tensors.keys() == own.manifest.tensors.keys() or pair == 0
        weights = [key for key in own.manifest.tensors if "/" not in key]
        assert [key for key in imported.manifest.tensors if "/" not in key] == weights
        for key in weights:
            torch.testing.assert_close(imported.read_whole(key), own.read_whole(key), rtol=1e-4, atol=1e-5)
    if pair == 0:
        start, export = blocks("docs/from_fsdp.md", "python")
        example = runpy.run_path(str(ROOT / "examples/from_fsdp1_loop.py"))
        exec(start, names := {"torch": torch, "pf": pf, "Net": example["Net"]})
        plain = torch.load("runs/fsdp1_loop.pt", weights_only=True)
        model = cast(nn.Module, names["model"])
        assert all(torch.equal(weight, plain[name]) for name, weight in model.named_parameters())
        exec(export, names)
        assert load_file("weights.safetensors").keys() == plain.keys()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def test_make_config_takes_classes_functions_and_values_and_names_mistakes() -> None:
    config = pf.make_config(
        model={"factory": Module, "freeze": ("linear.bias",)},
        train={"task": plain_losses, "steps": 3},
        optim={"betas": (0.9, 0.99), "groups": [{"match": "*", "lr": 1e-3}]},
        run={"dir": Path("runs/x")},
    )
    assert (config.model.factory, config.train.task) == (f"{__name__}:Module", f"{__name__}:plain_losses")
    assert (config.optim.betas, config.optim.groups[0].lr, config.run.dir) == ((0.9, 0.99), 1e-3, "runs/x")
    assert config_text(config)
    for sections, message in MISTAKES_IN_A_CONFIG:
        with pytest.raises(ConfigError, match=re.escape(message)):
            pf.make_config(**sections)


MISTAKES_IN_A_CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"optim": {"lrr": 1e-3}}, "optim.lrr"),
    ({"optim": {"lr": "fast"}}, "optim.lr: expected"),
    ({"optimizer": {"lr": 1e-3}}, "optimizer"),
    ({"model": {"factory": lambda: None}}, "or a class or function at the top level of a module, found <function"),
    ({"optim": 1e-3}, 'optim: expected a dict such as optim={"lr": 1e-3}, found 0.001'),
    ({"train": None}, 'train: expected a dict such as optim={"lr": 1e-3}, found None'),
    ({"model": {"factory": Module()}}, "model.factory: expected a YAML value, or a class or function"),
    ({"model": {"factory": functools.partial(Module)}}, "found functools.partial"),
    ({"precision": {"compute": torch.bfloat16}}, "precision.compute: expected a YAML value"),
    ({"train": {"global_batch": 8}}, "exactly one of train.steps and train.epochs"),
]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_a_loss_of_ones_own_needs_a_batch_without_padding_and_shard_refuses() -> None:
    """Statistics in another dtype, and what is no module."""
    model = {"architecture": TINY["model"]["architecture"]}
    sizes = {"steps": 1, "global_batch": 5, "micro_batch": 2}
    config = pf.make_config(model=model, data={"seq_len": 32}, train=sizes)
    with pf.open_backend(config, device="cpu", backend="native") as engine:
        message = r"found 5: the loss .* may count padding\.\n  Set train\.global_batch=4 or 6"
        with pytest.raises(ConfigError, match=message):
            pf.build_training(config, engine, 256, loss=cross_entropy_sum)
        pf.build_training(config, engine, 256)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"compute": "bfloat16"}, "its compute dtype bfloat16, found float32"),
        ({"buffers": "bfloat16"}, "its compute dtype float32, "),
        ({"compute": "bfloat16", "modules": {"1": "float32"}}, ""),
        ({"compute": "bfloat16", "buffers": "bfloat16"}, ""),
    ]
    for precision, found in cases:
        config, message = pf.make_config(precision=precision), f"expected running statistics of 1 in {found}"
        refused = pytest.raises(ConfigError, match=re.escape(message)) if found else nullcontext()
        with pf.open_backend(config, device="cpu", backend="native") as engine, refused:
            model, _ = pf.shard(normed, config, engine)
            model(torch.ones(4, 2)).sum().backward()
    config, message = pf.make_config(), r"shard: dict: expected it to return a torch\.nn\.Module"
    with pf.open_backend(config, device="cpu", backend="native") as engine, pytest.raises(ConfigError, match=message):
        pf.shard(dict, config, engine)  # pyright: ignore[reportArgumentType]


def test_unshard_starts_to_gather_a_unit() -> None:
    """And a sharded model can't be copied."""
    config = pf.make_config(memory={"cpu_offload": True})  # else one device has no shards, and nothing to gather
    with pf.open_backend(config, device="cpu", backend="native") as engine:
        model, _ = pf.shard(Module, config, engine)
        with pytest.raises(BackendError, match=r"can't be copied \(copy\.deepcopy, .*\n  Shard another"):
            copy.deepcopy(nn.Sequential(model))
        group = cast(Any, model)._get_fsdp_state()._fsdp_param_group  # FSDP2 has no public word for it
        assert group._all_gather_result is None
        engine.unshard(model)
        assert group._all_gather_result is not None
        engine.unshard(nn.Linear(1, 1))  # no unit
        engine.sum(torch.ones(()))


class Named(Module):
    """Wrappers of forwards have names of their own; a model's arguments may have any."""

    def forward(self, x: Tensor, uses: float, forward: float, module: float) -> Tensor:
        return self.linear(x) * uses * forward * module


class Reads(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.linear.weight.std().item()


MISTAKES = """
import copy, sys
import torch
import portable_fsdp as pf
from test_library_loops import Module, Named, Reads

config, x = pf.make_config(optim={"lr": 1e-3}), torch.ones(4, 2)
with pf.open_backend(config, device="cpu", backend=sys.argv[1]) as engine:
    model, optimizer = pf.shard(Module, config, engine)
    task = lambda model, batch: (model.linear(batch["x"]).sum(), len(batch["x"]))
    step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=None, task=task)
    placed, sgd = engine.place({"x": x}), torch.optim.SGD(model.parameters(), lr=0.1)
    own = engine.compile(lambda batch: {"loss": model(batch["x"]).sum()}, "own step")
    for mistake in (
        lambda: step([placed]),
        lambda: step([placed], "1e-3"),
        lambda: step(placed, 1e-3),
        lambda: step([placed, placed], 1e-3),
        lambda: step([(x, x)], 1e-3),
        lambda: engine.place((x, x)),
        lambda: engine.place({"x": x, "n": [1, 2]}),
        lambda: step([placed], 1e-3),
        lambda: step([placed], 1e-3, 4),
        lambda: engine.zero_gradients(torch.optim.AdamW(model.parameters()), keep=False),
        lambda: [engine.shard_optimizer(sgd) for _ in range(2)],
        lambda: pf.shard_model(Module(), config, engine),
        lambda: pf.shard_model(Module, pf.make_config(sharding={"tensor": 2}), engine),
        lambda: pf.shard(Reads, config, engine),
        lambda: pf.make_config(optim={"learning_rate": 1e-3}),
        *([lambda: step([{"x": x}], 1e-3), lambda: copy.deepcopy(model)] if sys.argv[1] == "xla" else []),
        *([lambda: own({"x": x})] if sys.argv[1] == "xla" else []),
    ):
        try:
            print(mistake())
        except pf.runtime.errors.PortableFSDPError as error:
            print(error)
    model, optimizer = pf.shard(Named, config, engine)
    task = lambda model, batch: (model(batch["x"], uses=1, forward=1, module=1).sum(), torch.tensor(4))
    step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=1.0, task=task)
    print("a loss of", engine.fetch(step([placed], 1e-2)).result()["loss"].dtype)
"""


@pytest.mark.parametrize("engine", ["native", pytest.param("xla", marks=pytest.mark.xla)])
def test_mistakes_of_a_loop_are_sentences_with_a_way_out(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], assert_golden: Any
) -> None:
    if engine == "native":
        monkeypatch.setattr(sys, "argv", ["-c", engine])
        exec(MISTAKES, {})
        answers = capsys.readouterr().out
    else:
        search = os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "tests", ROOT)))
        answers = finish([PYTHON, "-c", MISTAKES, engine], tmp_path, PYTHONPATH=search).out
    answers = re.sub(r"in \S+/test_library_loops\.py:\d+:", "in FILE:LINE:", answers)
    assert_golden(Path(__file__).parent / f"golden/loop_mistakes_{engine}.txt", answers)


LOOP = """
import sys
from portable_fsdp import load_config, open_backend
with open_backend(load_config(sys.argv[1]), device="cpu") as engine:
    print(f"process {engine.process.index} of {engine.process.count}")
"""


@pytest.mark.proof
def test_a_loop_of_ones_own_under_srun(tmp_path: Path) -> None:
    start = [*FAKE_LAUNCHERS, "srun", PYTHON, "-c", LOOP, ROOT / "configs/quickstart.yaml"]
    lines = re.findall(r"process \d of 2", finish(start, tmp_path, **two_tasks("srun")).out)  # both may share a line
    assert sorted(lines) == ["process 0 of 2", "process 1 of 2"]
