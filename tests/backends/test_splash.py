"""The attention kernel of TPUs, interpreted on the CPU, against torch's formula: alone, and in a model's layers."""

# The kernel's calls are counted where it is called.
# pyright: reportPrivateUsage=false

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cases import ARCHITECTURES, GLOBAL_BATCH, VOCABULARY, Case
from jobs import numbers, open_case
from test_curves import SGD
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from workers import GetWorkers, Group

from portable_fsdp.backends.torch_xla.spmd import attention, engine, splash
from portable_fsdp.backends.torch_xla.spmd.attention import _like_forward
from portable_fsdp.backends.torch_xla.spmd.splash import Kernel, splash_backward, splash_forward
from portable_fsdp.backends.torch_xla.spmd.tensors import as_operation
from portable_fsdp.config.schema import Config
from portable_fsdp.models.attention import attend
from portable_fsdp.train.build import build_training

pytestmark = pytest.mark.xla

ROWS, HEADS, LENGTH = 2, 4, 384
DOCUMENTS = torch.tensor([[1] * 100 + [2] * 200 + [0] * 84, [7] * LENGTH], dtype=torch.int32)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CASES: dict[str, tuple[Kernel, dict[str, Any]]] = {
    "causal": (Kernel(), {}),
    "every head its own keys": (Kernel(), {"key_heads": 4, "width": 128}),
    "one head of keys, wide": (Kernel(), {"key_heads": 1, "width": 256}),
    "values narrower than keys": (Kernel(), {"width": 192, "value_width": 128}),
    "window": (Kernel(window=150), {}),
    "window in a block": (Kernel(window=7), {}),
    "softcap": (Kernel(softcap=2.0), {}),
    "documents": (Kernel(), {"documents": DOCUMENTS}),
    "sinks": (Kernel(), {"sinks": SINKS}),
    "all of them": (Kernel(window=150, softcap=2.0), {"documents": DOCUMENTS, "sinks": SINKS, "width": 128}),
    "mixed blocks": (Kernel(window=150), {"documents": DOCUMENTS, "width": 128}),
    "two kernels in backward": (Kernel(window=150, softcap=2.0), {"documents": DOCUMENTS, "sinks": SINKS}),
    "bfloat16": (Kernel(window=150), {"documents": DOCUMENTS, "width": 128, "dtype": torch.bfloat16}),
}
CASES_IN_SUITE = ("causal", "values narrower than keys", "all of them", "mixed blocks")


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """jax must not look for chips."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in CASES_IN_SUITE)) for name in CASES]
)
def test_the_kernel_gives_what_torchs_formula_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks in a row; `mixed`: as for long rows, keys in larger blocks than queries, some of one at once."""
    keys = 384 if name == "mixed blocks" else 128
    limits = {"_FORWARD_BLOCK": keys, "_BACKWARD_QUERIES": 128, "_BACKWARD_KEYS": keys, "_AT_ONCE": 128}
    limits["_MOST_COPIES"] = 0 if name == "two kernels in backward" else 64
    for limit, tokens in limits.items():
        monkeypatch.setattr(splash, limit, tokens)
    kernel, given = CASES[name]
    kernel, dtype = replace(kernel, interpret=True), given.get("dtype", torch.float32)
    documents, sinks = given.get("documents"), given.get("sinks")
    width, key_heads = given.get("width", 64), given.get("key_heads", 2)
    value_width = given.get("value_width", width)
    shapes = [(HEADS, width), (key_heads, width), (key_heads, value_width), (HEADS, value_width)]
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(ROWS, heads, LENGTH, size, generator=generator).to(dtype) for heads, size in shapes
    )
    query = query * width**-0.5

    arrays = [_array(tensor) for tensor in (query, key, value, documents, sinks, None)]
    out, lse = cast(Any, splash_forward)(kernel, *arrays)
    gradients = cast(Any, splash_backward)(kernel, *arrays, out, lse, _array(gradient))

    leaves = [t.float().clone().requires_grad_() for t in (query, key, value, *([] if sinks is None else [sinks]))]
    mask = None if documents is None else documents[:, None, None]
    options: dict[str, Any] = {"causal": True, "window": kernel.window, "softcap": kernel.softcap, "scale": 1.0}
    options |= {"sinks": None if sinks is None else leaves[3], "dropout": 0.0}
    expected = attend(leaves[0], leaves[1], leaves[2], None, mask, **options)
    expected.backward(gradient.float())
    assert lse.shape == (ROWS, HEADS, LENGTH)
    assert lse.dtype == np.float32
    actual = [_tensor(out), *(_tensor(array) for array in gradients)]
    if sinks is not None:
        actual[4] = actual[4].sum(0)
    bound = 3e-6 if dtype == torch.float32 else 2e-2
    for result, wanted in zip(actual, [expected, *(leaf.grad for leaf in leaves)], strict=True):
        assert wanted is not None
        assert (result - wanted).abs().max() < bound * wanted.abs().max()


def test_a_window_is_that_much_less_work() -> None:
    """Half of the diagonal counted, as of a causal product."""
    assert Kernel().visible(1024) == Kernel(window=4096).visible(1024) == 1024 * 1024 // 2
    assert Kernel(window=256).visible(1024) == 256 * 256 // 2 + 768 * 256


def _array(tensor: Tensor | None) -> Any:
    import jax.numpy as jnp

    if tensor is None:
        return None
    whole = tensor.float() if tensor.is_floating_point() else tensor
    return jnp.asarray(whole.numpy(), dtype=str(tensor.dtype).removeprefix("torch."))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))


# -------------------------------------------------------------------------------- in a model's layers

LAYERS, DEVICES = 2, 4
_WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def case(
    model: str = "llama",
    checkpointing: str = "full",
    packing: str = "stream",
    save_ops: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    architecture = {**ARCHITECTURES[model], **_WIDE, "max_position_embeddings": 512}
    architecture |= {"sliding_window": 50} if "sliding_window" in architecture else {}
    settings: dict[str, Any] = {
        "data.seq_len": more.pop("length", 128),
        "data.packing": packing,
        "model.architecture": architecture,
    }
    settings |= {"compile.scan_layers": more.pop("scan", False), "memory.save_ops": save_ops}
    settings |= {f"sharding.{axis}": more.pop(axis, 1) for axis in ("tensor", "context")}
    return Case(model, steps=3, optim=SGD, max_grad_norm=None, checkpointing=checkpointing, settings=settings, **more)


RUNS = {
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
    "heads split": case(tensor=2, micro_batch=6),  # 2 heads, 1 key-value head
    "tokens split": case(context=2, micro_batch=6, length=256),
    "tokens split, scanned, documents": case(context=4, micro_batch=12, length=512, scan=True, packing="documents"),
    "tokens split, windows and sinks, documents": case(
        "gpt_oss", context=2, micro_batch=6, length=256, packing="documents"
    ),
    "tokens and heads split": case("gemma2", context=2, tensor=2, micro_batch=12, length=256),
}
RUNS_IN_SUITE = ("heads split",)


def kernel_run(case: Case, interpreted: bool) -> dict[str, Any]:
    """Three steps on rows of `data.seq_len` tokens: with the TPU's attention kernel in an interpreter, or without."""
    backend, config = open_case(case)
    calls: Counter[str] = Counter()

    def counted(function: Any, kernel: splash.Kernel, *tensors: Any) -> list[torch.Tensor]:
        calls[function.__name__] += 1
        return run(function, kernel, *tensors)

    run = splash.run_kernel
    with (
        backend,
        patch.object(attention, "run_kernel", counted),
        patch.object(engine, "LayerAttention", partial(engine.LayerAttention, interpret=True)),
        patch.object(engine, "MeshExperts", partial(engine.MeshExperts, interpret=True)),
    ):
        cast(Any, backend)._tensors.for_tpu = interpreted
        training = build_training(config, backend, vocabulary=256)
        metrics: list[dict[str, list[float]]] = []
        for step in range(3):
            rows = _long_rows(config, step)
            control = [float(rows["labels"].numel())]
            metrics.append(numbers(backend.fetch(training.step([backend.place(rows)], 0.01, control))))
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
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in RUNS_IN_SUITE)) for name in RUNS]
)
def test_steps_are_those_of_torchs_formula_and_a_second_run_calls_no_kernel(name: str, workers: GetWorkers) -> None:
    plain, kernel = (
        workers(Group("xla", DEVICES)).run(kernel_run, case=RUNS[name], interpreted=interpreted)[0]
        for interpreted in (False, True)
    )
    assert plain["calls"] == {}
    scanned = RUNS[name].settings["compile.scan_layers"]
    # A step is traced three times, and run as one program; a scanned body is traced once, and then again as a loop.
    times = 1 if scanned else 3 * LAYERS
    assert {key: calls >= times if scanned else calls for key, calls in kernel["calls"].items()} == {
        "splash_forward": True if scanned else times,
        "splash_backward": True if scanned else times,
    }
    assert kernel["compilations"] == plain["compilations"] == 1
    for ours, theirs in zip(kernel["metrics"], plain["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-5), key
    for fqn, weight in plain["weights"].items():
        torch.testing.assert_close(kernel["weights"][fqn], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "kept"), [(64, (2, 4, 256 * 64)), (128, (2, 4, 256, 128)), (192, (2, 4, 256 * 192))])
def test_what_a_layer_keeps_fills_the_lanes_of_a_tpu(width: int, kept: tuple[int, ...]) -> None:
    """A TPU pads the last dimension to a multiple of 128."""
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 256, width, dtype=torch.bfloat16) for heads in (4, 2))
        out, lse = as_operation("attention", cast(Any, None), _like_forward, query, key, key, None, None, None)
    assert (out.shape, lse.shape) == (kept, (2, 4, 256))
