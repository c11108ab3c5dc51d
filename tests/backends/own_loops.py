"""Loops that people write themselves, once for torch alone and once for an engine: each pattern is one step of such a
loop, by the few words of `Kit`."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jobs import numbers, open_group
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, NAdam, Optimizer, RMSprop, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import portable_fsdp as pf
from portable_fsdp.layout import full_region
from portable_fsdp.models.factory import open_factory

ROWS, STEPS = 24, 20
Batch = dict[str, Tensor]
Step = Callable[[Batch], Batch]


class Net(nn.Module):
    def __init__(self, inputs: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(inputs, 16), nn.LayerNorm(16), nn.Linear(16, outputs)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x))
        for block in self.blocks:
            x = x + block(x)
        self.kept = x
        return self.down(x) * self.scale


class Kit:
    """torch alone, in one process."""

    def module(self, make: Callable[[], nn.Module]) -> Any:
        """Make the module with the initial values that engines give it, which depend on the names of its weights."""
        model, fill = open_factory("plain", make, pf.make_config().run.seed, torch.float32)
        buffers = dict(model.named_buffers())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for fqn, weight in model.named_parameters():
                weight.copy_(fill(fqn, full_region(weight.shape)))
            for fqn, buffer in model.named_buffers():
                buffer.copy_(buffers[fqn])
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Before its first step."""

    def mean(self, of_rows: Tensor) -> Tensor:
        """The part of these rows in the mean over the global batch."""
        return of_rows.sum() / ROWS

    def backwards(self, *, last: bool = True, model: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def second_derivatives(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def without_backward(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def clip(self, weights: list[Tensor], limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(weights, limit)

    def zero(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    def whole(self, values: Batch) -> Batch:
        """The sums over all rows."""
        return {name: value.detach() for name, value in values.items()}


class Engine(Kit):
    def __init__(self, engine: Any, config: Any) -> None:
        self._engine, self._config = engine, config

    def module(self, make: Callable[[], nn.Module]) -> Any:
        return pf.shard_model(make, self._config, self._engine)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.shard_optimizer(optimizer)

    def backwards(self, *, last: bool = True, model: Any = None) -> AbstractContextManager[None]:
        return self._engine.accumulate(last, model)

    def second_derivatives(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._engine.second_derivatives(model)

    def without_backward(self) -> AbstractContextManager[None]:
        return self._engine.evaluate()

    def clip(self, weights: list[Tensor], limit: float) -> Tensor:
        return self._engine.clip_grad_norm(weights, limit)

    def zero(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self._engine.zero_gradients(optimizer, keep=False)

    def whole(self, values: Batch) -> Batch:
        return {name: self._engine.sum(value.detach()) for name, value in values.items()}


class Loop:
    """A step, what the host does between steps: `after(step number, losses of the step)`, and what a checkpoint holds:
    models, optimizers and objects by name."""

    def __init__(
        self, step: Step, after: Callable[[int, dict[str, float]], None] = lambda *_: None, saved: Any = ()
    ) -> None:
        self.step, self.after, self.saved = step, after, saved


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["classes"], reduction="none")


def adamw(model: nn.Module, betas: tuple[float, float] = (0.9, 0.99)) -> AdamW:
    """`eps`: the first steps would take a gradient of rounding errors for one of full size."""
    return AdamW(model.parameters(), lr=1e-2, betas=betas, eps=1e-5)


def simple(
    kit: Kit,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    loss_of: Callable[[Any, Batch], Tensor] = cross_entropy,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    before: Callable[[Any, int, torch.optim.Optimizer], None] = lambda *_: None,
) -> Loop:
    model = kit.module(Net)
    kit.optimizer(optimizer := make(model))
    scheduler = schedule(optimizer) if schedule else None

    def step(batch: Batch) -> Batch:
        with kit.backwards():
            loss = kit.mean(loss_of(model, batch))
            loss.backward()
        norm = kit.clip(list(model.parameters()), 1.0)
        optimizer.step()
        kit.zero(optimizer)
        return kit.whole({"loss": loss}) | {"norm": norm}

    def after(number: int, losses: dict[str, float]) -> None:
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(round(losses["loss"], 2))
        elif scheduler:
            scheduler.step()
        losses |= {f"rate {at}": group["lr"] for at, group in enumerate(optimizer.param_groups)}
        before(model, number + 1, optimizer)

    return Loop(step, after)


def gan(kit: Kit) -> Loop:
    generator, discriminator = kit.module(lambda: Net(4, 8)), kit.module(lambda: Net(8, 1))
    generator_optimizer, discriminator_optimizer = adamw(generator), adamw(discriminator, betas=(0.5, 0.9))
    kit.optimizer(generator_optimizer)
    kit.optimizer(discriminator_optimizer)

    def loss_of(logits: Tensor, is_real: float) -> Tensor:
        target = torch.full_like(logits, is_real)
        return kit.mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none"))

    def step(batch: Batch) -> Batch:
        kit.zero(discriminator_optimizer)
        fake = generator(batch["x"][:, :4] * 0.5)
        with kit.backwards():
            (real := loss_of(discriminator(batch["x"]), 1.0)).backward()
            (wrong := loss_of(discriminator(fake.detach()), 0.0)).backward()
        discriminator_optimizer.step()
        with kit.backwards():
            (fools := loss_of(discriminator(fake), 1.0)).backward()
        kit.clip(list(generator.parameters()), 0.5)
        generator_optimizer.step()
        kit.zero(generator_optimizer)
        return kit.whole({"real": real, "wrong": wrong, "fools": fools})

    return Loop(step)


def one_optimizer_of_two(kit: Kit) -> Loop:
    """Over all of one model and a part of the other; by SGD with momentum."""
    encoder, decoder = kit.module(lambda: Net(8, 4)), kit.module(lambda: Net(4, 8))
    weights = [*encoder.parameters(), *decoder.blocks.parameters()]
    kit.optimizer(optimizer := SGD(weights, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3))

    def step(batch: Batch) -> Batch:
        with kit.backwards():
            loss = kit.mean((decoder(encoder(batch["x"])) - batch["x"]).square().sum(-1))
            loss.backward()
        norm = kit.clip(weights, 0.5)
        optimizer.step()
        kit.zero(optimizer)
        for weight in decoder.parameters():
            weight.grad = None
        return kit.whole({"loss": loss}) | {"norm": norm}

    return Loop(step)


def teacher(kit: Kit) -> Loop:
    teacher_model, student = kit.module(lambda: Net().requires_grad_(False)), kit.module(Net)
    kit.optimizer(optimizer := RMSprop(student.parameters(), lr=1e-3))

    def step(batch: Batch) -> Batch:
        with kit.without_backward():
            wanted = (teacher_model(batch["x"]) * 2).softmax(-1)
        with kit.backwards():
            loss = kit.mean(-(student(batch["x"]).log_softmax(-1) * wanted).sum(-1))
            loss.backward()
        optimizer.step()
        kit.zero(optimizer)
        return kit.whole({"loss": loss})

    return Loop(step)


def average(kit: Kit) -> Loop:
    model = kit.module(Net)
    averaged = kit.module(lambda: AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False))
    kit.optimizer(optimizer := adamw(model))

    def step(batch: Batch) -> Batch:
        with kit.backwards():
            loss = kit.mean(cross_entropy(model, batch))
            loss.backward()
        optimizer.step()
        kit.zero(optimizer)
        averaged.update_parameters(model)
        with kit.without_backward():
            return kit.whole({"loss": loss, "averaged": kit.mean(cross_entropy(averaged, batch))})

    return Loop(step)


class Shadow:
    """An average of weights that a class of the user's own keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.values, self.updates, self.best = [w.detach().clone() for w in model.parameters()], 0, (math.inf, "none")

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for value, weight in zip(self.values, model.parameters(), strict=True):
                value.lerp_(weight, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Slow(Optimizer):
    """Lookahead (Zhang et al., arXiv 1907.08610): weights go half-way back to slow ones every third step. Its state
    begins as weights, and its count as a Python number."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                state = self.state[weight]
                if not state:
                    state["step"], state["slow"] = 0, weight.clone()
                state["step"] += 1
                weight.copy_(weight - 0.02 * weight.grad)
                if state["step"] % 3 == 0:
                    state["slow"].copy_(state["slow"] + 0.5 * (weight - state["slow"]))
                    weight.copy_(state["slow"])


def resumable(kit: Kit) -> Loop:
    """Two models, an average of one by torch and by a class of its own, and an optimizer that makes its state late."""
    encoder, decoder = kit.module(lambda: Net(8, 4)), kit.module(lambda: Net(4, 8))
    averaged = kit.module(
        lambda: AveragedModel(Net(8, 4), multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
    )
    of_encoder, of_decoder = adamw(encoder), NAdam(decoder.parameters(), lr=1e-3, eps=1e-5)
    kit.optimizer(of_encoder)
    kit.optimizer(of_decoder)
    schedule, shadow = lr_scheduler.OneCycleLR(of_encoder, 0.05, total_steps=40), Shadow(decoder)

    def step(batch: Batch) -> Batch:
        with kit.backwards():
            loss = kit.mean((decoder(encoder(batch["x"])) - batch["x"]).square().sum(-1))
            loss.backward()
        of_encoder.step()
        of_decoder.step()
        kit.zero(of_encoder, of_decoder)
        averaged.update_parameters(encoder)
        shadow.update(decoder)
        with kit.without_backward():
            average = kit.mean(averaged(batch["x"]).square().sum(-1))
        return kit.whole({"loss": loss, "average": average})

    def after(_: int, losses: dict[str, float]) -> None:
        schedule.step()
        shadow.updates += 1
        shadow.best = min(shadow.best, (losses["loss"], "loss"))
        group = of_encoder.param_groups[0]
        losses |= {"rate": group["lr"], "beta": group["betas"][0], "updates": shadow.updates, "best": shadow.best[0]}

    models = {"encoder": encoder, "decoder": decoder, "average": averaged}
    objects = {"schedule": schedule, "shadow": shadow}
    return Loop(step, after, (models, {"encoder": of_encoder, "decoder": of_decoder}, objects))


def several_backwards(kit: Kit) -> Loop:
    """Two of one forward and others, in contexts of gradients; before the last one a part of the model is frozen."""
    model = kit.module(Net)
    kit.optimizer(optimizer := adamw(model))

    def step(batch: Batch) -> Batch:
        with kit.backwards():
            out = model(batch["x"])
            first = kit.mean(F.cross_entropy(out, batch["classes"], reduction="none"))
            first.backward(retain_graph=True)
            (second := kit.mean(0.3 * out.square().mean(-1))).backward()
        with kit.backwards(last=False):
            kit.mean(0.2 * model(batch["x"].flip(0)).square().mean(-1)).backward()
        with kit.backwards(model=model):
            (third := kit.mean(model(batch["x"].flip(1)).square().mean(-1))).backward()
        model.down.requires_grad_(False)
        with kit.backwards():
            kit.mean(0.1 * model(-batch["x"]).square().mean(-1)).backward()
        model.down.requires_grad_(True)
        norm = kit.clip(list(model.parameters()), 0.5)
        optimizer.step()
        kit.zero(optimizer)
        return kit.whole({"first": first, "second": second, "third": third}) | {"norm": norm}

    return Loop(step)


def penalty(kit: Kit) -> Loop:
    model = kit.module(lambda: Net(8, 1))
    kit.optimizer(optimizer := adamw(model))

    def step(batch: Batch) -> Batch:
        x = batch["x"].detach().requires_grad_()
        with kit.backwards(), kit.second_derivatives(model):
            out = model(x).squeeze(1)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = kit.mean((out - batch["classes"]).square() + 0.1 * (slope.norm(dim=1) - 1).square())
            loss.backward()
        optimizer.step()
        kit.zero(optimizer)
        return kit.whole({"loss": loss})

    return Loop(step)


def freeze(model: Any, number: int, _: torch.optim.Optimizer) -> None:
    if number in (8, 14):
        model.blocks.requires_grad_(number == 14)


def load(_: Any, number: int, optimizer: torch.optim.Optimizer) -> None:
    if number == 5:
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "param_groups": [{**g, "lr": g["lr"] / 2} for g in saved["param_groups"]]})


def two_groups(model: nn.Module, lr: float = 1e-2) -> AdamW:
    decays = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": lr / 2}]
    return AdamW(groups, lr=lr, eps=1e-5)


def with_kept(model: Any, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) + 0.1 * model.kept.square().mean(-1)


def by_bucket(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["words"]).mean(1), batch["classes"], reduction="none")


def halves(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [lambda k: 1.0, lambda k: 2.0 - k % 5 / 4])


PATTERNS: dict[str, Callable[[Kit], Loop]] = {
    "gan": gan,
    "one optimizer of two models": one_optimizer_of_two,
    "teacher": teacher,
    "average": average,
    "resumable": resumable,
    "several backwards": several_backwards,
    "gradient penalty": penalty,
    "loaded half-way": lambda kit: simple(kit, two_groups, before=load),
    "frozen half-way": lambda kit: simple(kit, before=freeze),
    "three shapes": lambda kit: simple(kit, loss_of=by_bucket),
    "kept activations": lambda kit: simple(kit, loss_of=with_kept),
    "rates that coincide": lambda kit: simple(kit, two_groups, schedule=halves),
    "warm-up of 0.1": lambda kit: simple(
        kit, lambda m: two_groups(m, 0.1), schedule=lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1, k / 4))
    ),
    "one cycle": lambda kit: simple(kit, schedule=lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=40)),
    "optimizer of its own": lambda kit: simple(kit, lambda model: Slow(model.parameters())),
    "plateau": lambda kit: simple(
        kit, schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.1)
    ),
}
MORE_PROGRAMS = {"optimizer of its own": 1, "frozen half-way": 2, "three shapes": 1}
"""Changed sets of trained weights; the third shape, which comes after step 2."""


def rows_of(name: str, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 8, generator=generator)
    rows = {"x": x, "classes": (x[:, :3] + x[:, 3:6].sin()).argmax(1)}
    if name == "three shapes":
        rows["words"] = torch.randn(ROWS, 3 + number % 3, 8, generator=generator)
    return rows


def plain_run(name: str) -> list[dict[str, float]]:
    loop, out = PATTERNS[name](Kit()), list[dict[str, float]]()
    for number in range(STEPS):
        out.append({key: value.item() for key, value in loop.step(rows_of(name, number)).items()})
        loop.after(number, out[-1])
    return out


def step_without_context() -> None:
    config = pf.make_config()
    with open_group(config) as engine:
        model = pf.shard_model(Net, config, engine)
        engine.shard_optimizer(optimizer := adamw(model))
        model(rows_of("", 0)["x"]).sum().backward()
        optimizer.step()


def engine_run(name: str, settings: dict[str, Any]) -> tuple[list[dict[str, float]], int]:
    """The same on an engine, and the number of programs that were compiled after step 2."""
    config = pf.make_config(**settings)
    with open_group(config) as engine:
        loop, early = PATTERNS[name](Engine(engine, config)), 0

        def note(number: int) -> None:
            nonlocal early
            early = engine.compilations if number == 1 else early

        losses = run_steps(engine, loop, name, range(STEPS), note)
        return losses, engine.compilations - early


def run_steps(
    engine: Any, loop: Loop, name: str, steps: Iterable[int], note: Callable[[int], None] = lambda _: None
) -> list[dict[str, float]]:
    step, out = engine.compile(loop.step, "own step"), list[dict[str, float]]()
    for number in steps:
        part = engine.data_shard
        rows = {key: value.chunk(part.count)[part.index].clone() for key, value in rows_of(name, number).items()}
        out.append(numbers(engine.fetch(step(engine.place(rows)))))
        loop.after(number, out[-1])
        note(number)
    return out


def resumed_run(folder: str, again: str, first: int, last: int) -> list[dict[str, float]]:
    """Steps of the loop `resumable`, from the checkpoint of step `first` in `folder` (0: none) to one of step `last`.
    What is loaded is saved at once to `again`."""
    config = pf.make_config()
    with open_group(config) as engine:
        loop = resumable(Engine(engine, config))
        models, optimizers, objects = loop.saved
        with pf.Checkpoints(folder, engine, config={}, model_config=None) as checkpoints:
            if point := checkpoints.find("auto"):
                assert checkpoints.load(point, models, optimizers, objects).step == first
                with pf.Checkpoints(again, engine, config={}, model_config=None) as others:
                    others.save(first, models, optimizers, (0, 0), objects=objects)
                    others.wait()
            losses = run_steps(engine, loop, "resumable", range(first, last))
            checkpoints.save(last, models, optimizers, (0, 0), objects=objects)
            checkpoints.wait()
        return losses
