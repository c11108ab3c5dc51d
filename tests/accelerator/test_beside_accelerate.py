"""Default batches beside accelerate's own DistributedDataParallel: rows, rates and losses of each step."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from own_loops import Net
from patterns import accelerator, adamw, each_row
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from workers import GetWorkers, Group, marked

ROWS, BATCH = 43, 5
Row = tuple[Tensor, Tensor, int]
Steps = list[dict[str, Any]]


def row(index: int) -> Row:
    x = torch.randn(8, generator=torch.Generator().manual_seed(index))
    return x, (x[:3] + x[3:6].sin()).argmax(), index


class Rows(Dataset[Row]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Row:
        return row(index)


class Stream(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        yield from map(row, range(ROWS))


class Chosen(BatchSampler):
    """A sampler of the user's own, whose batches end with a short one."""

    def __init__(self) -> None:
        order = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(4))
        super().__init__(order, BATCH, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        yield from (batch[::-1] for batch in super().__iter__())


def loader(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH)
    if kind == "sampler":
        return DataLoader(Rows(), batch_sampler=Chosen())
    generator = torch.Generator().manual_seed(3) if kind != "unseeded" else None
    return DataLoader(Rows(), batch_size=BATCH, shuffle=True, drop_last=kind == "dropped", generator=generator)


KINDS = ("shuffled", "dropped", "stream", "sampler", "unseeded")


def epochs(acc: Any, kind: str) -> tuple[Steps, list[list[int]]]:
    """Rows, rate and loss of each batch, and the rows that the metrics of each epoch are over."""
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    schedule = OneCycleLR(optimizer, 0.05, total_steps=60)
    model, optimizer, rows, schedule = acc.prepare(model, optimizer, loader(kind), schedule)
    steps, metrics = Steps(), list[list[int]]()
    for _ in range(3):
        metrics.append([])
        for x, y, index in rows:
            with acc.accumulate(model):
                loss = each_row(model, x, y).mean()
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            whole = acc.gather(loss.detach()).mean().item()
            rate, whole_rows = optimizer.param_groups[0]["lr"], acc.gather(index).tolist()
            steps.append({"rows": whole_rows, "loss": whole, "rate": rate, "sync": acc.sync_gradients})
            metrics[-1] += acc.gather_for_metrics(index).tolist()
    return steps, metrics


def run_of_accelerate(kind: str) -> tuple[Steps, list[list[int]]]:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    assert os.environ["USE_TORCH_XLA"] == "0"
    acc = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert acc.num_processes == 2
    try:
        return epochs(acc, kind)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def run_of_ours(kind: str) -> tuple[Steps, list[list[int]]]:
    acc = accelerator(gradient_accumulation_steps=2)
    assert acc.num_processes == 2
    try:
        return epochs(acc, kind)
    finally:
        acc.end_training()


@pytest.mark.parametrize("group", [marked(Group(name, 2), in_suite=True) for name in ("gloo", "xla")])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_accelerate(kind: str, group: Group, workers: GetWorkers) -> None:
    expected, of_metrics = workers(Group("gloo", 2)).run(run_of_accelerate, kind=kind)[0]
    for steps, metrics in workers(group).run(run_of_ours, kind=kind):
        assert len(steps) == len(expected)
        for number, (actual, step) in enumerate(zip(steps, expected, strict=True)):
            assert actual | {"loss": 0} == step | {"loss": 0}, f"step {number}"
            assert actual["loss"] == pytest.approx(step["loss"], rel=1e-5), f"step {number}"
        assert metrics == of_metrics
