"""Custom training loops with several models and torch's optimizers, against the same loops in plain torch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import (
    MORE_PROGRAMS,
    PATTERNS,
    ROWS,
    Net,
    engine_run,
    plain_run,
    resumed_run,
    step_without_context,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from workers import GetWorkers, Group, JobFailed, marked

import portable_fsdp as pf
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.manifests import step_folder
from portable_fsdp.checkpoint.store import Reader

SHARDED: dict[str, Any] = {}
WHOLE: dict[str, Any] = {"sharding": {"strategy": "NO_SHARD"}}
PLACES = [
    marked(Group("native", 2), SHARDED, in_suite=True),
    marked(Group("xla", 4), SHARDED, in_suite=True),
    pytest.param(Group("native", 2), WHOLE, marks=pytest.mark.proof, id="native-2-NO_SHARD"),
    *(marked(group, SHARDED, in_suite=False) for group in (Group("native", 1), Group("native", 3), Group("xla", 1))),
]


@pytest.mark.parametrize(("group", "settings"), PLACES)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_losses_are_those_of_plain_torch(
    name: str, group: Group, settings: dict[str, Any], workers: GetWorkers
) -> None:
    expected = plain_run(name)
    for losses, late in workers(group).run(engine_run, name=name, settings=settings):
        for step, (actual, plain) in enumerate(zip(losses, expected, strict=True)):
            assert actual == pytest.approx(plain, rel=1e-5), f"step {step}"
        assert late == MORE_PROGRAMS.get(name, 0) * group.engine.compiles


@pytest.mark.xla
def test_named_models_and_objects_travel_between_engines(workers: GetWorkers, tmp_path: Path) -> None:
    expected, folder, again = plain_run("resumable"), tmp_path / "run", tmp_path / "again"
    legs = ((Group("native", 2), 0, 5), (Group("xla", 4), 5, 9), (Group("native", 1), 9, 12))
    for group, first, last in legs:
        job = {"folder": str(folder), "again": str(again), "first": first, "last": last}
        for losses in workers(group).run(resumed_run, **job):
            for step, actual in enumerate(losses, first):
                assert actual == pytest.approx(expected[step], rel=1e-5), f"step {step}"
        if first:  # what was loaded and saved at once
            with Reader(step_folder(folder, first)) as saved, Reader(step_folder(again, first)) as copy:
                assert copy.manifest.tensors.keys() == saved.manifest.tensors.keys()
                assert copy.manifest.named == saved.manifest.named
                for key in saved.manifest.tensors:
                    assert torch.equal(copy.read_whole(key), saved.read_whole(key)), key
    target = tmp_path / "average.safetensors"
    assert main(["export", str(folder), str(target), "--format=safetensors", "--model=average.module"]) == 0
    Net(8, 4).load_state_dict(load_file(target))


RECOMPUTED = {"name": "gradient penalty", "settings": {"memory": {"gradient_checkpointing": "full"}}}


@pytest.mark.parametrize(
    ("group", "words", "job", "arguments"),
    [
        marked(Group("native", 2), "[] isn't summed over the devices.\n  Run each backward", step_without_context, {}),
        marked(Group("xla", 4), "can't run through layers that backward recomputes.\n  Set", engine_run, RECOMPUTED),
    ],
)
def test_a_mistake_ends_in_a_sentence(
    group: Group, words: str, job: Callable[..., Any], arguments: dict[str, Any], workers: GetWorkers
) -> None:
    with pytest.raises(JobFailed) as failure:
        workers(group).run(job, **arguments)
    assert words in failure.value.message


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_no_optimizer_takes_are_named_once(clears: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A discriminator in the generator's step has some too: its own optimizer takes them."""
    config = pf.make_config()
    with pf.open_backend(config, device="cpu", backend="native") as engine:
        first, second, third = (pf.shard_model(lambda: torch.nn.Linear(2, 2), config, engine) for _ in range(3))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        for optimizer in optimizers:
            engine.shard_optimizer(optimizer)
        for _ in range(4):
            with engine.accumulate(True):
                third(second(first(torch.ones(2, 2)))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            engine.zero_gradients(optimizers[0], keep=False)
            if clears:
                third.zero_grad()
    warned = [message for message in caplog.messages if "since no optimizer has them" in message]
    assert [message.partition(":")[0] for message in warned] == ["Linear.weight, Linear.bias"] * (not clears)


def test_the_examples_of_the_docs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step is the pattern `gan`."""
    page = (Path(__file__).parents[2] / "docs/library.md").read_text()
    section = page.partition("## Several models and optimizers")[2].partition("## Callbacks")[0]
    step, save = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [export] = re.findall(r"portable_fsdp.checkpoint (export .*)", section)
    monkeypatch.chdir(tmp_path)

    def loss_of(logits: Tensor, is_real: float) -> Tensor:
        target = torch.full_like(logits, is_real)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum") / ROWS

    config = pf.make_config()
    with pf.open_backend(config, device="cpu", backend="native") as engine:
        names: dict[str, Any] = {"pf": pf, "torch": torch, "config": config, "engine": engine, "loss_of": loss_of}
        names |= {"Generator": lambda: Net(4, 8), "Discriminator": lambda: Net(8, 1)}
        exec(compile(step, "library.md", "exec"), names)
        batch = {"x": torch.randn(ROWS, 8), "noise": torch.randn(ROWS, 4)}
        losses = [engine.fetch(names["train"](engine.place(batch))).result() for _ in range(2)]
        names |= {"rows_of": lambda _: batch, "schedule": LinearLR(names["generator_optimizer"])}
        exec(compile(save, "library.md", "exec"), names)
    assert all(loss.isfinite() for step in losses for loss in step.values())
    assert all(losses[1][name] != losses[0][name] for name in ("discriminator", "generator"))  # both optimizers stepped
    assert main(export.split()) == 0
    exported = load_file("generator.safetensors")
    assert torch.equal(exported["up.weight"], names["generator"].up.weight)
