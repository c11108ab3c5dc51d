"""A run warns of num_processes other than its devices, and of a file's keys without effect."""

from pathlib import Path

import pytest
from foreign_files import FILES, read

from portable_fsdp import launch

OURS = Path(__file__).parents[2] / "configs/quickstart.yaml"
FILE = """distributed_type: FSDP
num_processes: 2
num_machines: 4
use_cpu: true
fsdp_config:
  fsdp_wrap_policy: SIZE_BASED_WRAP
  min_num_params: 5
  fsdp_forward_prefetch: true
  param_init_fn: init
  wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_version: 2
"""
OTHER = ":2: num_processes: 2, but the run has 1 device(s); train.global_batch is 64 all the same"
UNREAD = "its tool doesn't read it here"
WITHOUT_EFFECT = [
    f":6: fsdp_wrap_policy: SIZE_BASED_WRAP has no effect: {UNREAD}; nearest key of ours: sharding.wrap",
    f":8: fsdp_forward_prefetch: true has no effect: {UNREAD}; nearest key of ours: sharding.forward_prefetch",
    f":9: param_init_fn: init has no effect: {UNREAD}",
    ":7: min_num_params: 5 has no effect: used only with SIZE_BASED_WRAP; nearest key of ours: sharding.min_num_params",
]


def test_keys_without_effect_are_named_unless_the_run_has_their_value(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(FILE)
    loaded = read(theirs)
    [imported] = loaded.imports
    whole = [f"{theirs}{line}" for line in (OTHER, *WITHOUT_EFFECT)]
    assert list(imported.warnings(loaded.config, 1)) == whole
    assert list(imported.warnings(loaded.config, 2)) == list(imported.warnings(loaded.config, None)) == whole[1:]
    by_override = read(theirs, "sharding.wrap=SIZE_BASED_WRAP", "sharding.min_num_params=9")
    assert not [line for line in by_override.imports[0].warnings(by_override.config, 2) if "SIZE_BASED" in line]


def test_files_that_a_tool_wrote_have_no_warning() -> None:
    """The keys of json_inside.yaml were written by hand: version 1 beside a key of version 2."""
    all_loaded = [read(path) for path in FILES]
    warnings = [text for loaded in all_loaded for text in loaded.imports[0].warnings(loaded.config, None)]
    assert [text.split(": ")[1] for text in warnings] == ["fsdp_reshard_after_forward"]


@pytest.mark.slow
def test_launch_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, short = tmp_path / "theirs.yaml", tmp_path / "short.txt"
    theirs.write_text(FILE)
    short.write_text("hello")
    words = ["train.global_batch=64", "data.source=text", f"data.path={short}", f"run.dir={tmp_path}/run"]
    assert launch.main([f"--config={OURS}", f"--import={theirs}", "--device=cpu", *words]) == 2
    message = capsys.readouterr().err
    assert all(f"{theirs}{line}\n" in message for line in (OTHER, *WITHOUT_EFFECT)), message
