"""Models whose blocks pass more than tensors in tuples: test_boundary.py trains them on engines and in a plain loop."""

import dataclasses
import threading
from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

WIDTH = 12


@dataclasses.dataclass
class State:
    x: Tensor
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    more: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Output(ModelOutput):
    x: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


class Features(dict[str, Any]):
    """A container of the user's, which a copy as a plain dict would lack."""

    @property
    def x(self) -> Tensor:
        return self["x"]


class Block(nn.Module):
    """A block whose linear layers take three dimensions, so that its output is a view, as torch makes it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.aux: Any = None

    def compute(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) + x)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.compute(*args, **named)


class Model(nn.Module):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(self.block(number) for number in range(3))
        self.head = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            for number, weight in enumerate(self.parameters()):
                values = torch.arange(weight.numel(), dtype=torch.float32) * (0.7 + 0.1 * number)
                weight.copy_((values.sin() * 0.4).reshape(weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Changed(Model):
    """Blocks change the object that they take and return nothing."""

    class block(Block):
        def forward(self, state: State) -> None:
            state.x = self.compute(state.x)

    def middle(self, x: Tensor) -> Tensor:
        state = State(x, 0.9)
        for block in self.blocks:
            block(state)
        return state.x


class Nested(Model):
    """A dict of dataclasses: frozen ones with a dict of lists, and ones with slots and a field of __post_init__."""

    class block(Block):
        def forward(self, states: dict[str, Any]) -> dict[str, Any]:
            left = Frozen(self.compute(states["left"].x), {"kept": [states["left"].x * 0.1]})
            return {"left": left, "right": Slotted(states["right"].twice * 0.3 + states["left"].more["kept"][0])}

    def middle(self, x: Tensor) -> Tensor:
        states: dict[str, Any] = {"left": Frozen(x, {"kept": [x]}), "right": Slotted(x)}
        for block in self.blocks:
            states = block(states)
        return states["left"].x + states["right"].x + states["left"].more["kept"][0]


class Kinds(Model):
    """Each block takes and returns another kind: a named tuple, an output of transformers, a class of the user's."""

    class block(Block):
        def forward(self, value: Any) -> Any:
            x = self.compute(value.x)
            if self.number == 0:
                return Pair(x, x * 2)
            if self.number == 1:
                return Output(x=x, hidden=(value.y, x))
            return SimpleNamespace(queue=deque([Features(x=x)]), table=UserDict(y=value["hidden"][0]))

    def middle(self, x: Tensor) -> Tensor:
        value: Any = Features(x=x)
        for block in self.blocks:
            value = block(value)
        return value.queue[0].x + value.table["y"] * 0.5


class Beside(threading.local):
    """Values beside a model: each device has its own, where devices are threads."""

    def __init__(self) -> None:
        self.losses = list[Tensor]()


class Attribute(Model):
    """A loss on the block itself, one in a list and one beside the model, all read later; torch's backward begins with
    the last of them."""

    beside = Beside()

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = self.compute(x)
            self.aux = self.inner(out).square().mean(dim=(1, 2))
            self.several = {"list": [self.outer(x).mean(dim=(1, 2))]}
            Attribute.beside.losses.append(self.outer(self.inner(x)).mean(dim=(1, 2)))
            return out

    def forward(self, x: Tensor) -> Tensor:
        self.beside.losses.clear()
        logits = super().forward(x)
        for block in self.blocks:
            logits = logits + (block.aux + block.several["list"][0])[:, None, None]
        return logits * (1 + torch.stack(self.beside.losses).sum(dim=0))[:, None, None]


class OnlyAttribute(Model):
    """The last block returns nothing that has a gradient."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.aux = self.compute(x)
            return self.aux.detach() if self.number == 2 else self.aux

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + self.blocks[-1].aux


class Appended(Model):
    """Blocks append to a list and take from it, as U-Nets do, and write to a dict that they are given: in float32, also
    where they compute in bfloat16."""

    class block(Block):
        def forward(self, x: Tensor, skips: list[Tensor], notes: dict[str, Tensor]) -> Tensor:
            out = self.compute(x)
            notes[f"mean {self.number}"] = self.inner(x).mean(dim=-1, keepdim=True)
            if self.number < 2:
                skips.append((out * 0.5).float())
                return out
            return out + skips.pop().to(out.dtype)

    def middle(self, x: Tensor) -> Tensor:
        skips, notes = [x], dict[str, Tensor]()
        for block in self.blocks:
            x = block(x, skips, notes=notes)
        assert (len(skips), len(notes)) == (2, 3)
        return x + (skips[1] + notes["mean 1"] + skips[0]).to(x.dtype)


class InPlace(Model):
    """Changes outputs of blocks: a part of one that is a view, a view of one, one that is none."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.compute(x) + x if self.number == 2 else self.compute(x)

    def middle(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x[:, 0] += 1
        x = self.blocks[1](x)
        x[:, :, :4].mul_(2)
        x = self.blocks[2](x)
        x[:, :, 2:] *= 0.5
        x *= 2
        return x


class InputInPlace(Model):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += self.compute(x.clone())
            return x


class Parts(Model):
    """Calls a part of a block."""

    def middle(self, x: Tensor) -> Tensor:
        return self.blocks[1].inner(super().middle(x))


class Hidden(Model):
    """The last block computes what nothing that it returns leads to."""

    beside = Beside()

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            Hidden.beside.losses[:] = [loss := self.compute(x)]
            return loss.detach() if self.number == 2 else loss

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + self.beside.losses[0]


class ScalarBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.gate: Any = nn.Parameter(torch.tensor(0.5))
        self.frozen: Any = nn.Parameter(torch.tensor(0.25), requires_grad=False)
        self.shift: Any
        self.register_buffer("shift", torch.tensor(0.125))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.compute(x) + self.frozen * self.shift


class Scalars(Model):
    """A model with weights without a dimension, like CLIP's logit scale."""

    block = ScalarBlock

    def __init__(self) -> None:
        super().__init__()
        self.scales: Any = nn.ParameterList([nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.2))])
        self.logit_scale: Any = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.logit_scale.exp() * super().forward(x) * (1 + self.scales[0] * self.scales[1])


MODELS: dict[str, type[Model]] = {model.__name__: model for model in Model.__subclasses__()}


def rows_of_step(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(12, 5, WIDTH, generator=generator)
    return {"x": inputs, "classes": torch.randint(3, (12, 5), generator=generator)}


def loss_of_rows(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(
        model(batch["x"]).float().flatten(0, 1), batch["classes"].flatten(), reduction="sum"
    )
    return losses, torch.full_like(losses, batch["classes"].numel())


def plain_run(name: str, steps: int, lr: float) -> tuple[nn.Module, list[dict[str, float]]]:
    """torch's own loop in one process."""
    model = MODELS[name]()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    metrics: list[dict[str, float]] = []
    for number in range(steps):
        total, count = loss_of_rows(model, rows_of_step(number))
        loss = total / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item()})
    return model, metrics
