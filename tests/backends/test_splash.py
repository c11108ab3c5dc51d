"""The attention kernel of TPUs, interpreted on the CPU, against torch's formula: output, log-sum-exp and gradients."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from portable_fsdp.backends.torch_xla.spmd import splash
from portable_fsdp.backends.torch_xla.spmd.splash import Kernel, splash_backward, splash_forward
from portable_fsdp.models.attention import attend

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
    "bfloat16": (Kernel(window=150), {"documents": DOCUMENTS, "width": 128, "dtype": torch.bfloat16}),
}


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """jax must not look for chips."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_torchs_formula_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks in a row; `mixed`: as for long rows, keys in larger blocks than queries, some of one at once."""
    keys = 384 if name == "mixed blocks" else 128
    limits = {"_FORWARD_BLOCK": keys, "_BACKWARD_QUERIES": 128, "_BACKWARD_KEYS": keys, "_AT_ONCE": 128}
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

    arrays = [_array(tensor) for tensor in (query, key, value, documents, sinks)]
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
