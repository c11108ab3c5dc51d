"""Checkpoints of accelerate scripts: they travel between engines, process 0 may save alone, hooks get whole models."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from jobs import device_count
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workers import GetWorkers, Group, marked

from portable_fsdp.runtime.errors import CheckpointError, TrainingError

ALONE, TWO, XLA = Group("gloo", 1), Group("gloo", 2), Group("xla", 4)


def accelerator(**arguments: Any) -> Any:
    """Ours, on all devices of the worker's group."""
    from portable_fsdp import Accelerator

    start = {"device": os.environ["GROUP_DEVICE"], "backend": os.environ["GROUP_BACKEND"]}
    return Accelerator(**start, num_devices=device_count(), **arguments)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = x + block(x)
        return self.down(x) * self.scale


class Counter:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def rows(batch: int = 12) -> DataLoader[Any]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    order = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch, shuffle=True, generator=order)


def train(folder: Path, save_at: int, stop_at: int, resumes: bool) -> list[float]:
    """A script with accumulation, a schedule and a count, as accelerate's own examples save and resume it."""
    torch.manual_seed(0)
    acc, counter = accelerator(gradient_accumulation_steps=2, split_batches=True), Counter()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)
    net, optimizer, loader, scheduler = acc.prepare(net, optimizer, rows(), scheduler)
    acc.register_for_checkpointing(counter)
    if resumes:
        acc.load_state(folder)
    losses: list[float] = []
    first, done = divmod(counter.batches, len(loader))
    for epoch in range(first, 3):
        for x, y in acc.skip_first_batches(loader, done) if epoch == first and done else loader:
            with acc.accumulate(net):
                loss = F.cross_entropy(net(x), y)
                acc.backward(loss)
                acc.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(acc.engine.sum(loss.detach() * acc._share()).item())
            counter.batches += 1
            if counter.batches == save_at and acc.is_main_process:
                acc.save_state(folder)
            if counter.batches == stop_at:
                break
        else:
            continue
        break
    acc.end_training()
    return losses


@pytest.mark.xla
def test_a_checkpoint_in_mid_epoch_travels_between_engines(workers: GetWorkers, tmp_path: Path) -> None:
    """Process 0 saves it alone. The second save replaces the first in the same folder."""
    whole, *_ = workers(TWO).run(train, folder=tmp_path, save_at=10, stop_at=24, resumes=False)
    (on_xla,) = workers(XLA).run(train, folder=tmp_path, save_at=14, stop_at=16, resumes=True)
    (alone,) = workers(ALONE).run(train, folder=tmp_path, save_at=0, stop_at=24, resumes=True)
    assert on_xla == pytest.approx(whole[10:16], rel=1e-5)
    assert alone == pytest.approx(whole[14:], rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007"]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def save_in_hooks(folder: Path) -> list[Any]:
    """Two models, of which hooks save and load the first, as diffusers' scripts do it."""
    from transformers import LlamaForCausalLM

    acc = accelerator()
    text, net = acc.prepare(llama(), Net())
    optimizer = acc.prepare(torch.optim.AdamW([*text.parameters(), *net.parameters()], lr=1e-2))
    ids: Any = [{"ids": row} for row in torch.arange(128).view(16, 8) % 64]
    loader = acc.prepare(DataLoader(ids, batch_size=2))

    def save(models: list[Any], weights: list[Any], output: str) -> None:
        acc.wait_for_everyone()
        if acc.is_main_process:
            for model in [*models]:
                if isinstance(acc.unwrap_model(model), type(acc.unwrap_model(text))):
                    acc.unwrap_model(model).save_pretrained(Path(output, "text"))
                    acc.unwrap_model(text).save_pretrained(Path(output, "again"))  # the prepared one
                    weights.pop(models.index(model))

    def load(models: list[Any], folder: str) -> None:
        models.pop(0).load_state_dict(LlamaForCausalLM.from_pretrained(Path(folder, "text")).state_dict())

    def epoch() -> list[float]:
        losses: list[float] = []
        for batch in loader:
            loss = text(batch["ids"], labels=batch["ids"]).loss + net(batch["ids"].float()).square().mean()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(acc.engine.sum(loss.detach() * acc._share()).item())
        return losses

    acc.register_save_state_pre_hook(save)
    handle = acc.register_load_state_pre_hook(load)
    epoch()
    part: dict[str, Any] = {}
    if acc.is_main_process:
        acc.save_state(folder)
        acc.save_model(text, folder / "plain")
        text.save_pretrained(folder / "alone")
        part = {name: value.clone() for name, value in text.model.layers.state_dict().items()}
    of_all, main_alone = text.state_dict(), acc.get_state_dict(text)
    trained = epoch()
    acc.load_state(folder)
    again = epoch()
    handle.remove()
    with pytest.raises(CheckpointError, match="lacks the weights of model_0: a save hook took them"):
        acc.load_state(folder)
    text.load_state_dict(of_all)
    restored = text.state_dict()
    same = all(torch.equal(value, restored[name]) for name, value in of_all.items())
    acc.end_training()
    return [trained, again, of_all, main_alone, part, same]


@pytest.mark.parametrize("group", [marked(TWO, in_suite=True), marked(XLA, in_suite=True)])
def test_hooks_get_whole_models_and_a_model_gives_whole_tensors(
    group: Group, workers: GetWorkers, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    results = workers(group).run(save_in_hooks, folder=tmp_path)
    for index, (trained, again, of_all, main_alone, part, same) in enumerate(results):
        assert again == pytest.approx(trained, rel=1e-6)
        assert same
        assert of_all.keys() == llama().state_dict().keys()
        assert main_alone.keys() == ({} if index else of_all).keys()
        for name, value in part.items():
            assert torch.equal(value, of_all[f"model.layers.{name}"])
    for name in ("text", "again", "plain", "alone"):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert len(saved) == len(results[0][2]) - 1  # tied
        assert all(torch.equal(value, results[0][2][key]) for key, value in saved.items()), name
    (checkpoint,) = tmp_path.glob("step-*")
    from portable_fsdp.checkpoint.manifests import read_manifest

    keys = read_manifest(checkpoint).tensors
    assert "exp_avg/model_0.model.norm.weight" in keys
    assert "model_1.up.weight" in keys
    assert "model_0.model.norm.weight" not in keys


def pickle_alone(folder: Path) -> list[bool]:
    acc = accelerator()
    net = acc.prepare(Net())
    x = torch.ones(4, 8)
    expected = net(x.to(acc.device)).detach().cpu()
    if acc.is_main_process:
        torch.save(net, folder / "net.pt")
    acc.wait_for_everyone()
    again = torch.load(folder / "net.pt", weights_only=False)
    kept = [type(again) is Net, torch.allclose(again(x), expected)]
    acc.end_training()
    return kept


@pytest.mark.parametrize("group", [marked(group, in_suite=True) for group in (ALONE, TWO, XLA)])
def test_a_pickled_model_is_a_whole_one_of_the_scripts_class(group: Group, workers: GetWorkers, tmp_path: Path) -> None:
    assert workers(group).run(pickle_alone, folder=tmp_path) == [[True] * 2] * group.processes


def by_hand(folder: Path) -> tuple[list[float], list[float], list[str]]:
    """Losses after four steps, and again after loading what process 0 alone wrote with torch.save then, and the
    checkpoints of a folder that is saved into twice."""
    acc = accelerator(split_batches=True)
    torch.manual_seed(0)
    net = Net()
    net, optimizer, loader = acc.prepare(net, torch.optim.Adam(net.parameters(), 1e-2), rows())
    for _ in range(2):
        acc.save_state(folder / "last")
    batches = [batch for _, batch in zip(range(8), loader, strict=False)]

    def steps(some: list[Any]) -> list[float]:
        losses: list[float] = []
        for x, y in some:
            loss = F.cross_entropy(net(x), y)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(acc.reduce(loss.detach(), "mean")))
        return losses

    steps(batches[:4])
    if acc.is_main_process:
        torch.save({"net": acc.get_state_dict(net), "optimizer": optimizer.state_dict()}, folder / "own.pt")
    acc.wait_for_everyone()
    first = steps(batches[4:])
    state = torch.load(folder / "own.pt", map_location="cpu")
    acc.unwrap_model(net).load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    second = steps(batches[4:])
    acc.end_training()
    return first, second, [path.name for path in (folder / "last").glob("step-*")]


@pytest.mark.parametrize("group", [marked(group, in_suite=True) for group in (TWO, XLA)])
def test_process_0_saves_an_optimizer_by_itself(group: Group, workers: GetWorkers, tmp_path: Path) -> None:
    for first, second, checkpoints in workers(group).run(by_hand, folder=tmp_path):
        assert second == pytest.approx(first, rel=1e-6)
        assert checkpoints == ["step-00000001"]


def test_a_run_s_own_checkpoints_stay_beside_those_of_a_script(tmp_path: Path) -> None:
    from portable_fsdp import Accelerator

    made = Path(__file__).parents[1] / "checkpoint/made_before/run/checkpoints"
    shutil.copytree(made, tmp_path / "checkpoints")
    acc = Accelerator(device="cpu", backend="native", num_devices=1)
    acc.prepare(Net())
    acc.save_state(tmp_path / "checkpoints")
    acc.end_training()
    assert (tmp_path / "checkpoints/step-00000002/manifest.json").exists()
    assert len([*(tmp_path / "checkpoints").glob("step-*")]) == 2


def orders(folder: Path, resume: bool) -> list[list[float]]:
    """The rows of epochs 1 and 2, each followed by an evaluation, after a save or a load between epochs 0 and 1."""
    acc = accelerator(split_batches=True)
    torch.manual_seed(0)
    x = torch.arange(24.0)
    loaders = DataLoader(TensorDataset(x), 6, shuffle=True), DataLoader(TensorDataset(x), 6)
    _, rows, others = acc.prepare(Net(), *loaders)
    if resume:
        acc.load_state(folder)
    seen: list[list[float]] = []
    for epoch in range(int(resume), 3):
        seen.append([each for (batch,) in rows for each in acc.gather(batch).tolist()])
        for _ in others:
            pass
        if epoch == 0:
            acc.save_state(folder)
    acc.end_training()
    return seen[-2:]


@pytest.mark.parametrize("group", [marked(group, in_suite=True) for group in (ALONE, TWO)])
def test_epochs_after_a_load_have_the_orders_of_a_run_that_went_on(
    group: Group, workers: GetWorkers, tmp_path: Path
) -> None:
    """The order of a loader that draws from torch's own generator, beside one that draws nothing."""
    went_on, resumed = (workers(group).run(orders, folder=tmp_path, resume=resume) for resume in (False, True))
    assert resumed == went_on
    assert went_on[0][0] != went_on[0][1]


def keep_two(folder: Path) -> list[Any]:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    acc = accelerator(project_config=project)
    net = acc.prepare(Net())
    kept: list[Any] = []
    for number in range(3):
        with torch.no_grad():
            net.scale.fill_(float(number))
        acc.save_state()
        kept.append(sorted(path.name for path in (folder / "checkpoints").iterdir()))
    acc.load_state()
    kept.append(net.scale.item())
    acc.load_state(str(folder / "checkpoints/checkpoint_1"))
    kept.append(net.scale.item())
    acc.project_configuration.iteration = 2
    with pytest.raises(ValueError, match="checkpoint_2 exists"):
        acc.save_state()
    for wrong, message in (
        (lambda: acc.load_state(str(folder)), "has no checkpoint"),
        (lambda: acc.load_state(str(folder / "nothing")), "is no folder"),
        (lambda: acc.register_for_checkpointing(3), "Item at index 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            cast(Callable[[], None], wrong)()
    acc.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match="it holds the objects accelerator, random; this run has"):
        acc.load_state(str(folder / "checkpoints/checkpoint_2"))
    acc.end_training()
    return kept


def test_names_limits_and_errors_are_accelerates(workers: GetWorkers, tmp_path: Path) -> None:
    (kept,) = workers(ALONE).run(keep_two, folder=tmp_path)
    names = [f"checkpoint_{number}" for number in range(3)]
    assert kept == [names[:1], names[:2], names[1:], 2.0, 1.0]


def call_something_else(folder: Path) -> str:
    acc = accelerator()
    acc.prepare(Net())
    message = ""
    if acc.is_main_process:
        acc._next_batch()
    else:
        with pytest.raises(TrainingError) as raised:
            acc.save_state(folder)
        message = str(raised.value)
    acc.end_training()
    return message


def test_another_process_that_saves_alone_is_told_what_process_0_does(workers: GetWorkers, tmp_path: Path) -> None:
    _, message = workers(TWO).run(call_something_else, folder=tmp_path)
    assert message.startswith(f"process 1 is at save_state('{tmp_path}'), and process 0 at its next batch.")


def run_script(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One of the scripts below, by torchrun on two processes."""
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc_per_node=2"]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [*map(str, torchrun), str(Path(__file__)), name]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def validate_alone() -> None:
    from portable_fsdp import Accelerator

    acc = Accelerator(device="cpu", backend="native", run={"peer_timeout_s": 5})
    net, loader = acc.prepare(Net(), rows(4))
    for number, (x, y) in enumerate(loader):
        acc.backward(F.cross_entropy(net(x), y))
        if acc.is_main_process and number == 0:
            time.sleep(7)
            print("was busy", flush=True)
        if acc.is_main_process and number == 1:
            net(x)


def test_a_forward_by_process_0_alone_is_ended_and_work_on_its_host_is_not(tmp_path: Path) -> None:
    done = run_script("validate_alone", tmp_path)
    assert done.returncode == 1
    assert "was busy" in done.stdout
    assert "process 0 has run a forward of Net alone for 5 s: 1 other process(es) wait at its next batch" in done.stderr


def fail_in_one() -> None:
    from portable_fsdp import Accelerator

    acc = Accelerator(device="cpu", backend="native", run={"peer_timeout_s": 5})
    net, loader = acc.prepare(Net(), rows(4))
    for number, (x, y) in enumerate(loader):
        acc.backward(F.cross_entropy(net(x), y))
        if acc.process_index == 1 and number == 2:
            raise ValueError("this process fails")


def test_the_end_of_a_process_is_a_sentence_on_the_others(tmp_path: Path) -> None:
    done = run_script("fail_in_one", tmp_path)
    assert done.returncode == 1
    assert "[rank1]: ValueError: this process fails" in done.stderr
    assert re.search(
        r"^process 1 on .* ended by an error after \d step.*: this process fails$", done.stderr, re.MULTILINE
    )
    assert "[rank0]" not in done.stderr
    assert "Exception ignored" not in done.stderr


def save_last() -> None:
    from portable_fsdp import Accelerator

    acc = Accelerator(device="cpu", backend="native")
    net = acc.prepare(Net())
    if acc.is_main_process:
        acc.save_model(net, "last")
        acc.save_state("state")


def test_process_0_saves_at_the_end_of_a_script_without_end_training(tmp_path: Path) -> None:
    done = run_script("save_last", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "last/model.safetensors").exists()
    assert (tmp_path / "state/step-00000000/manifest.json").exists()


if __name__ == "__main__":
    {"validate_alone": validate_alone, "save_last": save_last, "fail_in_one": fail_in_one}[sys.argv[1]]()
