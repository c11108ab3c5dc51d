"""The TPU's attention kernel in a model's layers, interpreted on CPU devices: the steps of torch's formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ARCHITECTURES, Case
from test_curves import SGD
from torch._subclasses.fake_tensor import FakeTensorMode
from workers import Group, Workers

from portable_fsdp.backends.torch_xla.spmd.attention import _operations

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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in IN_SUITE)) for name in CASES]
)
def test_steps_are_those_of_torchs_formula_and_a_second_run_calls_no_kernel(
    name: str, workers: Callable[[Group], Workers]
) -> None:
    plain, kernel = (
        workers(Group("xla", DEVICES)).run("kernel_run", case=CASES[name], interpreted=interpreted)[0]
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
