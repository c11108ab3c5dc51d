"""accelerate's names: each is in the table, and the page shows it."""

from types import SimpleNamespace

import accelerate
import pytest
from documented import ROOT

from portable_fsdp import Accelerator
from portable_fsdp.accelerator.front import name_table
from portable_fsdp.runtime.errors import ConfigError


def test_each_name_of_accelerates_class_is_in_the_table_and_on_the_page() -> None:
    """Fails when a new accelerate adds a name."""
    table = name_table()
    named = [name for names in table.values() for name in names]
    theirs = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert {*named} == theirs
    assert len(named) == len({*named})
    own = {name for name in vars(Accelerator) if name in theirs} - table["refused"].keys()
    inherited_here = own - table["own"].keys()
    assert inherited_here == set(), "in the class, but not in the table as own"
    rows = [f"| `{name}` | {kind} | {text or ''} |" for kind, names in table.items() for name, text in names.items()]
    page = (ROOT / "docs/accelerator.md").read_text()
    assert page.partition("| name | here | |\n|---|---|---|\n")[2].splitlines() == rows


@pytest.mark.parametrize("name", ["join_uneven_inputs", "maybe_context_parallel"])
def test_a_refused_name_says_why(name: str) -> None:
    accelerator = Accelerator(device="cpu", backend="native")
    try:
        with pytest.raises(ConfigError, match=rf"Accelerator\.{name} isn't built: .*leave it out"):
            getattr(accelerator, name)
        assert not hasattr(accelerator, "no_such_name")
    finally:
        accelerator.end_training()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision=fp16 isn't built"),
        ({"dynamo_backend": "inductor"}, r"dynamo_backend: pass compile={'enabled': True}"),
        ({"device_placement": False}, "device_placement=False"),
        ({"dataloader_config": SimpleNamespace(use_stateful_dataloader=True)}, "use_stateful_dataloader isn't built"),
        ({"sharding": {"strateg": "FULL_SHARD"}}, "unknown key"),
        ({"backend": "cuda"}, "--backend=cuda: expected one of"),
    ],
)
def test_an_argument_that_nothing_honours_is_refused_at_once(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        Accelerator(device="cpu", **arguments)  # pyright: ignore[reportArgumentType]
