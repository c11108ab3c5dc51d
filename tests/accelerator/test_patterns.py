"""Loops written for accelerate, on both engines, against the same loops in plain torch."""

from typing import Any, cast

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, patch_environment
from own_loops import Net
from patterns import MORE_PROGRAMS, PATTERNS, ShadowParams, accelerated_run, accelerator, plain_run
from torch.utils.data import DataLoader
from workers import GetWorkers, Group, marked

from portable_fsdp.runtime.errors import BackendError

SUITE = (Group("gloo", 2), Group("xla", 4))
PROOFS = (Group("gloo", 1), Group("gloo", 3), Group("xla", 1))
PLACES = [marked(group, in_suite=group in SUITE) for group in (*SUITE, *PROOFS)]


@pytest.mark.parametrize("group", PLACES)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_losses_are_those_of_plain_torch(name: str, group: Group, workers: GetWorkers) -> None:
    expected: list[dict[str, Any]] = plain_run(name)
    for steps, late in workers(group).run(accelerated_run, name=name):
        for step, (actual, plain) in enumerate(zip(steps, expected, strict=True)):
            assert actual == pytest.approx(plain, rel=1e-5), f"step {step}"
        assert late == MORE_PROGRAMS.get(name, 0) * group.engine.compiles


def plain_backward() -> str:
    """A gradient of an input is nobody's sum; a whole backward would be."""
    acc = accelerator()
    try:
        model = acc.prepare(Net())
        x = torch.ones(2, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        assert slope.shape == x.shape
        try:
            model(x).sum().backward()
        except BackendError as error:
            return str(error)
        return ""
    finally:
        acc.end_training()


def test_a_backward_of_the_loss_itself_is_refused_on_several_processes(workers: GetWorkers) -> None:
    for sentence in workers(Group("gloo", 2)).run(plain_backward):
        assert sentence.startswith("backward: Net is sharded")
        assert "accelerator.backward(loss)" in sentence


def averaged(all_do: bool) -> tuple[bool, bool]:
    """Whole weights are put in, read and taken out, as diffusion scripts do for a validation. The weights have the
    average then, and at the end their own values."""
    torch.manual_seed(0)
    acc, has_average = accelerator(), True
    model = Net()
    before = [weight.detach().clone() for weight in model.parameters()]
    shadow = ShadowParams(weight + 1 for weight in before)
    model = acc.prepare(model)
    acc.wait_for_everyone()
    if all_do or acc.is_main_process:
        shadow.store([*model.parameters()])
        shadow.copy_to([*model.parameters()])
        saved = acc.unwrap_model(model).state_dict()
        names = [name for name, _ in model.named_parameters()]
        has_average = all(torch.equal(saved[name], own) for name, own in zip(names, shadow.shadow_params, strict=True))
        shadow.restore([*model.parameters()])
    acc.wait_for_everyone()
    after = acc.unwrap_model(model).state_dict()
    is_back = all(
        torch.equal(after[name], own) for (name, _), own in zip(model.named_parameters(), before, strict=True)
    )
    acc.end_training()
    return has_average, is_back


@pytest.mark.parametrize("all_do", [False, True], ids=["process 0 alone", "all processes"])
def test_an_average_is_put_in_and_taken_out(all_do: bool, workers: GetWorkers) -> None:
    assert workers(Group("gloo", 2)).run(averaged, all_do=all_do) == [(True, True)] * 2


def test_an_optimizer_without_its_model_is_refused_at_its_step() -> None:
    from portable_fsdp import Accelerator
    from portable_fsdp.runtime.errors import ConfigError

    acc = Accelerator(device="cpu", backend="native")
    optimizer = acc.prepare(torch.optim.AdamW(Net().parameters()))
    with pytest.raises(ConfigError, match=r"step: AdamW has weights of a model that isn't prepared"):
        optimizer.step()
    acc.end_training()


def shares() -> list[list[int]]:
    acc = accelerator()
    try:
        rows = [*range(7)]
        with acc.split_between_processes(rows) as first, acc.state.split_between_processes(rows) as second:
            return [first, second]
    finally:
        acc.end_training()


@pytest.mark.parametrize("group", [marked(group, in_suite=True) for group in SUITE])
def test_a_process_gets_the_share_of_all_its_devices(group: Group, workers: GetWorkers) -> None:
    expected = [[*range(7)]] if group.processes == 1 else [[0, 1, 2, 3], [4, 5, 6]]
    assert workers(group).run(shares) == [[part, part] for part in expected]


def test_after_a_reset_of_the_states_an_engine_may_have_other_arguments() -> None:
    from accelerate.state import AcceleratorState

    from portable_fsdp import Accelerator
    from portable_fsdp.runtime.errors import ConfigError

    first = Accelerator(device="cpu", backend="native")
    assert Accelerator(device="cpu", backend="native").engine is first.engine
    with pytest.raises(ConfigError, match="has a different precision: None"):
        Accelerator(device="cpu", backend="native", mixed_precision="bf16")
    AcceleratorState._reset_state()
    second = Accelerator(device="cpu", backend="native", mixed_precision="bf16")
    assert second.engine is not first.engine
    assert second.mixed_precision == "bf16"
    third = Accelerator(device="cpu", backend="native", mixed_precision="bf16", gradient_accumulation_steps=3)
    assert third.engine is second.engine
    assert third.gradient_accumulation_steps == 3
    third.end_training()


def launched_twice() -> list[Any]:
    """An optimizer's state before and after its first step, of two Accelerators under `accelerate launch`."""
    seen: list[Any] = []
    with patch_environment(accelerate_mixed_precision="no"):
        for _ in range(2):
            acc = accelerator()
            net = torch.nn.Linear(2, 1)
            net, optimizer = acc.prepare(net, torch.optim.Adam(net.parameters()))
            before = optimizer.state_dict()
            acc.backward(net(torch.ones(2, 2, device=acc.device)).sum())
            optimizer.step()
            seen.append((before["state"], sorted(optimizer.state_dict()["state"])))
            acc.end_training()
    return seen


@pytest.mark.parametrize("group", [marked(group, in_suite=True) for group in SUITE])
def test_a_second_accelerator_starts_and_an_optimizer_has_state_once_it_stepped(
    group: Group, workers: GetWorkers
) -> None:
    assert workers(group).run(launched_twice) == [[({}, [0, 1])] * 2] * group.processes


def dealt() -> list[list[int]]:
    acc = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = acc.prepare(DataLoader(cast(Any, range(7)), batch_size=2))
    try:
        return [acc.gather_for_metrics(batch).tolist() for batch in loader]
    finally:
        acc.end_training()


def test_process_0_reads_all_rows_with_dispatch_batches(workers: GetWorkers) -> None:
    assert workers(SUITE[0]).run(dealt) == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


def launched_by_accelerate() -> None:
    from portable_fsdp import Accelerator

    acc = Accelerator()
    total = acc.reduce(torch.tensor([acc.process_index + 1.0]))
    assert total.tolist() == [3.0]
    acc.end_training()


def test_the_debug_launcher_of_accelerate_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import debug_launcher

    monkeypatch.setenv("PORTABLE_FSDP", "device=cpu backend=native")
    debug_launcher(launched_by_accelerate, num_processes=2)
