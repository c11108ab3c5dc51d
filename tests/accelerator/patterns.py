"""Training loops as people write them for accelerate, and `Plain`, which runs the same ones in torch alone.

A pattern is a generator: it makes its models, prepares them, and yields the numbers of each step. Losses are kept row
by row, so that `gather_for_metrics` gives the mean over the global batch, however its rows are divided.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from jobs import device_count
from own_loops import Net, adamw, two_groups
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import NAdam, Optimizer, RMSprop, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

STEPS = 20
Steps = Generator[dict[str, float]]
Pattern = Callable[[Any], Steps]


class Plain:
    """accelerate's words for one process, by torch alone."""

    device = torch.device("cpu")
    sync_gradients, _at_end, _batches = True, False, 0

    def __init__(self, gradient_accumulation_steps: int = 1) -> None:
        self._every = gradient_accumulation_steps

    def prepare(self, *args: Any) -> Any:
        done = [
            self._rows(each) if isinstance(each, DataLoader) else AtSync(self, each) if hasattr(each, "step") else each
            for each in args
        ]
        return done if len(done) > 1 else done[0]

    def _rows(self, loader: DataLoader[Any]) -> Any:
        plain = self

        class Rows:
            def __iter__(self) -> Iterator[Any]:
                plain._batches = 0
                for number, batch in enumerate(loader, 1):
                    plain._at_end = number == len(loader)
                    yield batch

        return Rows()

    @contextmanager
    def accumulate(self, _: nn.Module) -> Generator[None]:
        self._batches += 1
        self.sync_gradients = self._at_end or self._batches % self._every == 0
        yield

    def no_sync(self, _: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, count: Tensor | None = None, **kwargs: Any) -> None:
        (loss / self._every).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Any, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit)

    def gather_for_metrics(self, values: Any) -> Any:
        return values


class AtSync:
    """An optimizer or scheduler that does nothing before the last micro batch of a step."""

    def __init__(self, plain: Plain, wrapped: Any) -> None:
        self._plain, self._wrapped = plain, wrapped

    def step(self, *args: Any) -> None:
        if self._plain.sync_gradients:
            self._wrapped.step(*args)

    def zero_grad(self) -> None:
        if self._plain.sync_gradients:
            self._wrapped.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._wrapped.param_groups


def accelerator(**arguments: Any) -> Any:
    """Ours, on all devices of the worker's group."""
    from portable_fsdp import Accelerator

    start = {"device": os.environ["GROUP_DEVICE"], "backend": os.environ["GROUP_BACKEND"]}
    return Accelerator(**start, num_devices=device_count(), **arguments)


def rows(count: int = 480, batch: int = 24, drop_last: bool = True) -> DataLoader[Any]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, (x[:, :3] + x[:, 3:6].sin()).argmax(1))
    order = torch.Generator().manual_seed(7)
    return DataLoader(data, batch_size=batch, shuffle=True, drop_last=drop_last, generator=order)


def forever(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def each_row(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def means(acc: Any, **of_rows: Tensor) -> dict[str, float]:
    whole = acc.gather_for_metrics({name: values.detach() for name, values in of_rows.items()})
    return {name: values.cpu().mean().item() for name, values in whole.items()}


def trained(
    acc: Any,
    make: Callable[[nn.Module], Optimizer] = adamw,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor] = each_row,
    schedule: Callable[[Any], Any] | None = None,
    between: Callable[[Any, int], None] = lambda *_: None,
    data: Callable[[], Any] = rows,
    after_prepare: bool = False,
    zero_first: bool = False,
    net: Callable[[], Any] = Net,
) -> Steps:
    """One model, one optimizer."""
    model = net()
    if after_prepare:
        model = acc.prepare(model)
    optimizer = make(model)
    if zero_first:
        optimizer = acc.prepare(optimizer)  # before its model, which it waits for
        optimizer.zero_grad()
    scheduler = schedule(optimizer) if schedule else None
    of_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    if not after_prepare:
        model = acc.prepare(model)
    scheduler, optimizer, loader = acc.prepare(scheduler, optimizer, data())
    for number, (x, y) in enumerate(forever(loader), 1):
        if zero_first:
            optimizer.zero_grad()
        with acc.accumulate(model):
            losses = loss_of(model, x, y)
            acc.backward(losses.mean())
            optimizer.step()
            if scheduler and not of_metric:
                scheduler.step()
            if not zero_first:
                optimizer.zero_grad()
        numbers = means(acc, loss=losses)
        if scheduler and of_metric:
            scheduler.step(round(numbers["loss"], 2))
        groups = optimizer.param_groups
        yield numbers | {f"rate {at}": group["lr"] for at, group in enumerate(groups)}
        between(model, number + 1)


def classifier(acc: Any) -> Steps:
    """The usual loop; with two micro batches a step."""
    model = Net()
    model, optimizer, loader = acc.prepare(model, adamw(model), rows(batch=12))
    numbers = dict[str, float]()
    for x, y in forever(loader):
        with acc.accumulate(model):
            losses = each_row(model, x, y)
            acc.backward(losses.mean())
            if acc.sync_gradients:
                numbers["norm"] = acc.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        numbers |= {f"loss {int(acc.sync_gradients)}": means(acc, loss=losses)["loss"]}
        if acc.sync_gradients:
            yield numbers | {"norm": numbers["norm"].item()}  # pyright: ignore[reportAttributeAccessIssue]


def counted(acc: Any) -> Steps:
    """A mask leaves some rows out: the mean is over those that count."""
    model = Net()
    model, optimizer, loader = acc.prepare(model, adamw(model), rows())
    for x, y in forever(loader):
        counts = (x[:, 7] > 0).float()
        losses = each_row(model, x, y) * counts
        acc.backward(losses.sum() / counts.sum(), counts.sum())
        optimizer.step()
        optimizer.zero_grad()
        numbers = means(acc, loss=losses, counts=counts)
        yield {"loss": numbers["loss"] / numbers["counts"]}


def gan(acc: Any) -> Steps:
    generator, judge = Net(4, 8), Net(8, 1)
    generator, judge, of_generator, of_judge, loader = acc.prepare(
        generator, judge, adamw(generator), adamw(judge, betas=(0.5, 0.9)), rows()
    )

    def loss_of(rows_of: Tensor, is_real: float) -> Tensor:
        logits = judge(rows_of)
        target = torch.full_like(logits, is_real)
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none")

    for x, _ in forever(loader):
        fake = generator(x[:, :4] * 0.5)
        of_judge.zero_grad()
        real, wrong = loss_of(x, 1.0), loss_of(fake.detach(), 0.0)
        acc.backward(real.mean())
        acc.backward(wrong.mean())
        of_judge.step()
        of_generator.zero_grad()
        fools = loss_of(fake, 1.0)
        acc.backward(fools.mean())
        acc.clip_grad_norm_(generator.parameters(), 0.5)
        of_generator.step()
        yield means(acc, real=real, wrong=wrong, fools=fools)


def teacher(acc: Any) -> Steps:
    """The teacher is frozen and never prepared."""
    wise, student = Net().eval().requires_grad_(False).to(acc.device), Net()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    student, optimizer, loader = acc.prepare(student, optimizer, rows())
    for x, _ in forever(loader):
        with torch.no_grad():
            target = (wise(x) * 2).softmax(-1)
        losses = -(student(x).log_softmax(-1) * target).sum(-1)
        acc.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        yield means(acc, loss=losses)


def average(acc: Any) -> Steps:
    """An average of weights by torch's class, which copies the model before it is prepared."""
    model = Net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    model, averaged, optimizer, loader = acc.prepare(model, averaged, adamw(model), rows())
    for x, y in forever(loader):
        losses = each_row(model, x, y)
        acc.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        with torch.no_grad():
            yield means(acc, loss=losses, averaged=each_row(averaged, x, y))


class ShadowParams:
    """An EMA of weights as diffusion scripts have it: `foreach` or one by one; it copies tensors, not a model."""

    def __init__(self, weights: Any) -> None:
        self.shadow_params: list[Tensor] = [weight.clone().detach() for weight in weights]

    def to(self, device: torch.device) -> None:
        self.shadow_params = [weight.to(device) for weight in self.shadow_params]

    def step(self, weights: list[Tensor], foreach: bool) -> None:
        with torch.no_grad():
            if foreach:
                moved = cast(Any, torch)._foreach_sub(self.shadow_params, weights)
                cast(Any, torch)._foreach_sub_(self.shadow_params, moved, alpha=0.1)
                return
            for shadow, weight in zip(self.shadow_params, weights, strict=True):
                shadow.sub_(0.1 * (shadow - weight))

    def copy_to(self, weights: list[Tensor]) -> None:
        for shadow, weight in zip(self.shadow_params, weights, strict=True):
            weight.data.copy_(shadow.to(weight.device).data)

    def store(self, weights: list[Tensor]) -> None:
        self.kept = [weight.detach().cpu().clone() for weight in weights]

    def restore(self, weights: list[Tensor]) -> None:
        for kept, weight in zip(self.kept, weights, strict=True):
            weight.data.copy_(kept.data)


def shadow_params(acc: Any) -> Steps:
    """The shadow is made before the model is prepared, and put in for an evaluation."""
    model = Net()
    shadow, optimizer = ShadowParams(model.parameters()), adamw(model)
    model, optimizer, loader = acc.prepare(model, optimizer, rows())
    shadow.to(acc.device)
    averaged = torch.zeros(())
    for number, (x, y) in enumerate(forever(loader)):
        losses = each_row(model, x, y)
        acc.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        weights = [*model.parameters()]
        shadow.step(weights, foreach=number == 0)
        if number == 0:
            kept = [weight.detach().clone() for weight in weights]
            shadow.copy_to(weights)
            with torch.no_grad():
                averaged = each_row(model, x, y)
            for weight, value in zip(weights, kept, strict=True):
                weight.data.copy_(value.data)
        yield means(acc, loss=losses, averaged=averaged)


def two_losses(acc: Any) -> Steps:
    """Two backwards of one forward."""
    model = Net()
    model, optimizer, loader = acc.prepare(model, adamw(model), rows())
    for x, y in forever(loader):
        out = model(x)
        first, second = F.cross_entropy(out, y, reduction="none"), 0.3 * out.square().mean(-1)
        acc.backward(first.mean(), retain_graph=True)
        acc.backward(second.mean())
        norm = acc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield means(acc, first=first, second=second) | {"norm": norm.item()}


def two_forwards(acc: Any) -> Steps:
    model = Net()
    model, optimizer, loader = acc.prepare(model, adamw(model), rows())
    for x, y in forever(loader):
        first, second = each_row(model, x, y), model(x.flip(1)).square().mean(-1)
        acc.backward(first.mean())
        acc.backward(second.mean())
        acc.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield means(acc, first=first, second=second)


def penalty(acc: Any) -> Steps:
    """A loss that holds a gradient."""
    model = Net(8, 1)
    model, optimizer, loader = acc.prepare(model, adamw(model), rows())
    for x, y in forever(loader):
        x = x.detach().requires_grad_()
        out = model(x).squeeze(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        losses = (out - y).square() + 0.1 * (slope.norm(dim=1) - 1).square()
        acc.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        yield means(acc, loss=losses)


def early_stop(acc: Any) -> Steps:
    """Ends on a metric of all rows: at the same step everywhere."""
    model = Net()
    model, optimizer, loader = acc.prepare(model, adamw(model), rows())
    best = 0.0
    for number, (x, y) in enumerate(forever(loader)):
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        acc.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        classes, expected = acc.gather_for_metrics((logits.argmax(-1), y))
        accuracy = (classes == expected).float().mean().item()
        yield means(acc, loss=losses) | {"accuracy": accuracy}
        if number > 8 and accuracy < best:
            return
        best = max(best, accuracy)


def unsynchronised(acc: Any) -> Steps:
    """Accumulation by hand."""
    model = Net()
    model, optimizer, loader = acc.prepare(model, adamw(model), rows(batch=12))
    first = torch.zeros(())
    for number, (x, y) in enumerate(forever(loader)):
        with acc.no_sync(model) if number % 2 == 0 else nullcontext():
            losses = each_row(model, x, y)
            acc.backward(losses.mean() / 2)
        if number % 2 == 0:
            first = losses
            continue
        optimizer.step()
        optimizer.zero_grad()
        yield means(acc, loss=losses, first=first)


class Words(Dataset[Any]):
    """Rows of three lengths; the rows of a batch have one."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randn(3 + index // 24 % 3, 8, generator=torch.Generator().manual_seed(index))
        return words, words[0, :3].argmax()


class Looks(nn.Module):
    """Looks up one index a row, of int64 `[rows]`."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = Net(), nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 6] > 0).long() + 2 * (x[:, 7] > 0).long()
        return self.net(x) + self.table(ids) + self.table(input=3 - ids)


def words() -> DataLoader[Any]:
    return DataLoader(Words(), batch_sampler=BatchSampler(SequentialSampler(range(480)), 24, drop_last=True))


def of_words(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), y, reduction="none")


def kept(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return each_row(model, x, y) + 0.1 * model.kept.square().mean(-1)


def hooked(model: Any, x: Tensor, y: Tensor) -> Tensor:
    outputs = list[Tensor]()
    hook = model.blocks[0].register_forward_hook(lambda *args: outputs.append(args[-1]))
    losses = each_row(model, x, y)
    hook.remove()
    return losses + 0.1 * outputs[0].square().mean(-1)


def read(model: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = each_row(model, x, y)
    assert losses.mean().item() > 0
    return losses


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)


def freeze(model: Any, number: int) -> None:
    if number in (8, 14):
        model.blocks.requires_grad_(number == 14)


def _by(make: Any, **arguments: Any) -> Pattern:
    return lambda acc: trained(acc, lambda model: make(model.parameters(), **arguments))


def _scheduled(schedule: Callable[[Any], Any], make: Callable[[nn.Module], Optimizer] = adamw) -> Pattern:
    return lambda acc: trained(acc, make, schedule=schedule)


PATTERNS: dict[str, Pattern] = {
    "classifier": classifier,
    # 77 rows, 12 a batch: the epoch ends with 5, and with half a step.
    "uneven": lambda acc: trained(acc, schedule=one_cycle, data=lambda: rows(77, 12, drop_last=False), net=Looks),
    "counted": counted,
    "gan": gan,
    "teacher": teacher,
    "average": average,
    "shadow params": shadow_params,
    "lambda": _scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1, (k + 1) / 8))),
    "one cycle": _scheduled(one_cycle),
    "plateau": _scheduled(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.1)),
    "kept": lambda acc: trained(acc, loss_of=kept),
    "hooked": lambda acc: trained(acc, loss_of=hooked),
    "frozen half-way": lambda acc: trained(acc, between=freeze),
    "two losses": two_losses,
    "two forwards": two_forwards,
    "three shapes": lambda acc: trained(acc, loss_of=of_words, data=words),
    "early stop": early_stop,
    "read": lambda acc: trained(acc, loss_of=read),
    "groups": lambda acc: trained(acc, two_groups),
    "made late": lambda acc: trained(acc, schedule=one_cycle, after_prepare=True),
    "warm-up of 0.1": _scheduled(
        lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1, k / 4)), lambda model: two_groups(model, 0.1)
    ),
    "gradient penalty": penalty,
    "SGD": _by(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": _by(RMSprop, lr=1e-3),
    "Adagrad": _by(torch.optim.Adagrad, lr=1e-2),
    "NAdam": _by(NAdam, lr=1e-3, eps=1e-5),
    "zeroed first": lambda acc: trained(acc, zero_first=True),
    "no_sync": unsynchronised,
}
ACCUMULATION = {"classifier": 2, "uneven": 2}
MORE_PROGRAMS: dict[str, int] = {"frozen half-way": 2, "three shapes": 1, "uneven": 2}
"""Changed sets of trained weights; shapes that come after step 2 (with that of the losses, which are gathered)."""


def plain_run(name: str) -> list[dict[str, float]]:
    torch.manual_seed(0)
    return [*itertools.islice(PATTERNS[name](Plain(ACCUMULATION.get(name, 1))), STEPS)]


def accelerated_run(name: str, **settings: Any) -> tuple[list[dict[str, float]], int]:
    """The numbers of each step, and the number of programs compiled after step 2."""
    torch.manual_seed(0)
    acc = accelerator(gradient_accumulation_steps=ACCUMULATION.get(name, 1), split_batches=True, **settings)
    try:
        steps, programs = list[dict[str, float]](), list[int]()
        for numbers in itertools.islice(cast(Any, PATTERNS[name])(acc), STEPS):
            steps.append(numbers)
            programs.append(acc.engine.compilations)
        return steps, programs[-1] - programs[1]
    finally:
        acc.end_training()
