"""The TPU's attention kernel in a model's layers, interpreted on CPU devices: the steps of torch's formula."""

from collections import Counter
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from cases import ARCHITECTURES, GLOBAL_BATCH, VOCABULARY, Case
from jobs import open_case
from test_curves import SGD
from torch._subclasses.fake_tensor import FakeTensorMode
from workers import GetWorkers, Group

from portable_fsdp.backends.torch_xla.spmd import engine, splash
from portable_fsdp.backends.torch_xla.spmd.attention import _operations
from portable_fsdp.config.schema import Config
from portable_fsdp.train.build import build_training

pytestmark = pytest.mark.xla

LAYERS, DEVICES = 2, 4
_WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def case(
    model: str = "llama",
    checkpointing: str = "full",
    packing: str = "stream",
    save_ops: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    architecture = {**ARCHITECTURES[model], **_WIDE, "max_position_embeddings": 128}
    if "sliding_window" in architecture:
        architecture["sliding_window"] = 50
    settings: dict[str, Any] = {"data.seq_len": 128, "data.packing": packing, "model.architecture": architecture}
    settings |= {"compile.scan_layers": more.pop("scan", False), "memory.save_ops": save_ops}
    return Case(model, steps=3, optim=SGD, max_grad_norm=None, checkpointing=checkpointing, settings=settings, **more)


CASES = {
    "not recomputed": case(checkpointing="none"),
    "recomputed, documents": case(packing="documents"),
    "scanned, recomputed, documents": case(packing="documents", scan=True),
    "scanned": case(checkpointing="none", scan=True),
    "products kept": case(checkpointing="selective", save_ops=("matmul", "attention")),
    "products kept, scanned": case(checkpointing="selective", save_ops=("matmul",), scan=True),
    "products kept, kept gathered": case(checkpointing="selective", save_ops=("matmul",), strategy="SHARD_GRAD_OP"),
    "products kept, sinks": case("gpt_oss", checkpointing="selective", save_ops=("matmul",)),
    "kept gathered, recomputed": case(strategy="SHARD_GRAD_OP"),
    "windows and softcaps, recomputed": case("gemma2"),
    "windows and sinks, recomputed, documents": case("gpt_oss", packing="documents"),
}
IN_SUITE = ("scanned, recomputed, documents", "windows and sinks, recomputed, documents")


def kernel_run(case: Case, interpreted: bool) -> dict[str, Any]:
    """Three steps on rows of `data.seq_len` tokens: with the TPU's attention kernel in an interpreter, or without."""
    backend, config = open_case(case)
    calls: Counter[str] = Counter()

    def counted(kernel: splash.Kernel, function: Any, *tensors: Any) -> list[torch.Tensor]:
        calls[function.__name__] += 1
        return run(kernel, function, *tensors)

    run = splash.Kernel._run
    with (
        backend,
        patch.object(splash.Kernel, "_run", counted),
        patch.object(engine, "LayerAttention", partial(engine.LayerAttention, interpret=True)),
    ):
        cast(Any, backend)._tensors.for_tpu = interpreted
        training = build_training(config, backend, vocabulary=256)
        metrics: list[dict[str, list[float]]] = []
        for step in range(3):
            rows = _long_rows(config, step)
            pending = backend.fetch(training.step([backend.place(rows)], 0.01, [float(rows["labels"].numel())]))
            metrics.append({name: value.tolist() for name, value in pending.result().items()})
        weights = {fqn: parameter.detach().cpu() for fqn, parameter in training.model.named_parameters()}
    return {"metrics": metrics, "weights": weights, "calls": dict(calls), "compilations": backend.compilations}


def _long_rows(config: Config, seed: int) -> dict[str, torch.Tensor]:
    shape = (GLOBAL_BATCH, config.data.seq_len)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    if config.data.packing == "documents":
        cut = shape[1] // 3
        segments = (torch.arange(shape[1]) >= cut).long().expand(shape) + 1
        positions = (torch.arange(shape[1]) - cut * (segments - 1)).contiguous()
        batch |= {"segments": segments.contiguous(), "positions": positions}
    return batch


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in IN_SUITE)) for name in CASES]
)
def test_steps_are_those_of_torchs_formula_and_a_second_run_calls_no_kernel(name: str, workers: GetWorkers) -> None:
    plain, kernel = (
        workers(Group("xla", DEVICES)).run(kernel_run, case=CASES[name], interpreted=interpreted)[0]
        for interpreted in (False, True)
    )
    assert plain["calls"] == {}
    scanned = CASES[name].settings["compile.scan_layers"]
    # A step is traced three times, and run as one program; a scanned body is traced once, and then again as a loop.
    times = 1 if scanned else 3 * LAYERS
    assert {key: calls >= times if scanned else calls for key, calls in kernel["calls"].items()} == {
        "splash_forward": True if scanned else times,
        "splash_backward": True if scanned else times,
    }
    assert kernel["compilations"] == plain["compilations"] == 1
    for ours, theirs in zip(kernel["metrics"], plain["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for fqn, weight in plain["weights"].items():
        torch.testing.assert_close(kernel["weights"][fqn], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "kept"), [(64, (2, 4, 256 * 64)), (128, (2, 4, 256, 128)), (192, (2, 4, 256 * 192))])
def test_what_a_layer_keeps_fills_the_lanes_of_a_tpu(width: int, kept: tuple[int, ...]) -> None:
    """A TPU pads the last dimension to a multiple of 128."""
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 256, width, dtype=torch.bfloat16) for heads in (4, 2))
        out, lse = _operations()[0](query, key, key, None, None, "")
    assert (out.shape, lse.shape) == (kept, (2, 4, 256))
