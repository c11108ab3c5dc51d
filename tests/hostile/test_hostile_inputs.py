"""A hundred inputs of each family; benchmarks/hostile_inputs.py reads 2,000 of each, with the same bounds."""

import gc
from pathlib import Path

import pytest
from harness import FAMILIES, attempt


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_inputs_end_with_one_error_or_a_legal_value(family: str, tmp_path: Path) -> None:
    gc.collect()
    gc.freeze()  # what earlier tests left is not an input's work
    accepted = 0
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            accepted += attempt(FAMILIES[family](seed, folder), folder).message is None
        except AssertionError as error:
            raise AssertionError(f"{family}, seed {seed}: {error}") from error
    gc.unfreeze()
    assert accepted < 100, "a family of legal inputs shows nothing"
