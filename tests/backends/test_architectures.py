"""Each family of models trains on every engine as transformers' own does in a plain loop, in the promised programs.

What it learnt, exported, opens in transformers with the same weights and the same loss.
"""

import re
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import ARCHITECTURES, Case, assemble
from reference import OWN_ATTENTION, loss_of_step
from test_curves import FP32_20_STEPS, assert_equal_curves
from torch import nn
from transformers import AutoModelForCausalLM
from workers import GetWorkers, Group, marked

from portable_fsdp.formats.base import ExportOptions
from portable_fsdp.formats.exporting import export_checkpoint

SAVED_AT, STEPS = 19, 20


def open_plainly(folder: Path, case: Case) -> nn.Module:
    """By transformers alone, which must have found all that it looked for and no more."""
    attention = OWN_ATTENTION.get(ARCHITECTURES[case.model]["model_type"], "sdpa")
    opened, report = cast(Any, AutoModelForCausalLM).from_pretrained(
        folder, output_loading_info=True, attn_implementation=attention, experts_implementation="eager"
    )
    assert not any(report.values()), report
    return opened


def assert_holds(opened: nn.Module, trained: dict[str, torch.Tensor]) -> None:
    """Bit for bit the weights and buffers that were saved, ties kept, and nothing else."""
    weights = {key: tensor for key, tensor in trained.items() if "/" not in key}  # else of the optimizer
    state = opened.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(weights)
    for key, tensor in weights.items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(state[key], tensor), key


# One of each kind: tied and untied, biases, windows, softcaps, learnt positions, experts, sinks, latent attention.
IN_SUITE = ["gpt2", "opt", "qwen3", "gemma2", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3"]


# Each of them trains on native for every commit, but for qwen3 and phi3, which are near llama. The rest are proofs.
PROOFS = {"native": ("qwen3", "phi3"), "xla": IN_SUITE}  # on xla other tests train phi3, gpt2 and gpt_oss
EACH = [
    marked(group, model, in_suite=model in IN_SUITE and model not in PROOFS[group.backend])
    for group in (Group("native", 3), Group("xla", 4))
    for model in ARCHITECTURES
]


@pytest.mark.parametrize(("where", "model"), EACH)
def test_every_family_trains_and_opens(where: Group, model: str, workers: GetWorkers, tmp_path: Path) -> None:
    case = Case(model=model, steps=STEPS)
    answers = workers(where).run(jobs.write, case=case, folder=str(tmp_path / "checkpoints"), at=SAVED_AT)
    assert_equal_curves([{"metrics": answer["before"] + answer["metrics"]} for answer in answers], case)
    for answer in answers:
        assert answer["compilations"] == answer["expected_compilations"]
    export_checkpoint(
        tmp_path / f"checkpoints/step-{SAVED_AT:08d}", "huggingface", tmp_path / "export", ExportOptions()
    )
    opened = open_plainly(tmp_path / "export", case)
    assert_holds(opened, assemble([answer["state"] for answer in answers]))
    with torch.no_grad():  # the engine's loss with these weights, before the update of the step
        assert loss_of_step(case, opened, STEPS).item() == pytest.approx(
            answers[0]["metrics"][-1]["loss"], rel=FP32_20_STEPS
        )


def test_the_page_lists_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs/features.md").read_text()
    trained = page.partition("Each commit trains these")[2].partition("Every engine refuses")[0]
    each_commit, each_release = (re.findall(r"`([\w-]+)`", part) for part in trained.split("Each release"))
    assert sorted(each_commit + each_release) == sorted({case["model_type"] for case in ARCHITECTURES.values()})
    assert set(each_commit) == set(IN_SUITE)
