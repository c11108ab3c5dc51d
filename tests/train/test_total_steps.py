"""How many updates a run has: as said, or as its epochs come to; and whether its schedule fits into them."""

import pytest

from portable_fsdp.config.schema import Config, Model, Optim, Train
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import total_steps


def config(**train: float) -> Config:
    return Config(model=Model(pretrained="folder"), train=Train.model_validate(train))


def test_steps_are_taken_as_they_are() -> None:
    assert total_steps(config(steps=10), rows=1) == 10


def test_epochs_are_whole_steps() -> None:
    assert total_steps(config(epochs=0.29, global_batch=1), rows=100) == 29  # 28.999... in binary
    assert total_steps(config(epochs=2, global_batch=8), rows=15) == 3
    with pytest.raises(ConfigError, match=r"train\.epochs: expected at least one step of train\.global_batch=8"):
        total_steps(config(epochs=1, global_batch=8), rows=7)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    long = config(epochs=1, global_batch=1).model_copy(update={"optim": Optim(warmup_steps=6)})
    assert total_steps(long, rows=6) == 6
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: expected at most 5"):
        total_steps(long, rows=5)
