"""Whether products of int8 are shorter than those of bfloat16, by TPU generation: cycles that libtpu estimates.

    python benchmarks/int8_products.py

Compiles the products of a layer of Llama 3 8B for 8,192 tokens, forward and for the gradients of activations, with code
generation, and adds up `estimated_cycles` of the program. int8 scales each row of both factors in each product, as
portable_fsdp/backends/torch_xla/spmd/sums.py does. No chip is needed; none has run it.
"""

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from portable_fsdp.plan.tpu_compiler import ENVIRONMENT, devices_of

os.environ.update(ENVIRONMENT)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TOKENS, WIDTH, INNER, KEYS = 8192, 4096, 14_336, 1024
SLICES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
WEIGHTS = {  # outputs, inputs
    **{"q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH)},
    **{"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)},
}
TAKES = {"q": "x", "k": "x", "v": "x", "o": "heads", "gate": "z", "up": "z", "down": "inner"}
RESULT = Path(__file__).parent / "results/int8_products.md"
Product = Callable[[Any, Any], Any]


def in_bfloat16(x: Any, weight: Any) -> Any:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def in_int8(x: Any, weight: Any) -> Any:
    (rows, scales), (columns, factors) = _rounded(x), _rounded(weight)
    sums = jax.lax.dot_general(rows, columns, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * scales * factors[:, 0]).astype(x.dtype)


def _rounded(tensor: Any) -> tuple[Any, Any]:
    scales = jnp.maximum(jnp.abs(tensor).max(-1, keepdims=True).astype(jnp.float32), 1e-30) / 127
    return jnp.round(tensor / scales).astype(jnp.int8), scales


def layer(product: Product, inputs: dict[str, Any], weights: dict[str, Any], gradients: dict[str, Any]) -> Any:
    outputs = [product(inputs[TAKES[name]], weight) for name, weight in weights.items()]
    return outputs, [product(gradients[name], weight.T) for name, weight in weights.items()]


def cycles(topology: str, product: Product) -> dict[str, int]:
    """Of each kind of operation; `products` with what is fused into them."""
    everywhere = NamedSharding(Mesh(np.array(devices_of(topology)), ("chip",)), PartitionSpec())

    def tensor(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere)

    inputs = {TAKES[name]: tensor(TOKENS, wide) for name, (_, wide) in WEIGHTS.items()}
    weights = {name: tensor(*shape) for name, shape in WEIGHTS.items()}
    gradients = {name: tensor(TOKENS, outputs) for name, (outputs, _) in WEIGHTS.items()}
    program = jax.jit(lambda *arguments: layer(product, *arguments)).lower(inputs, weights, gradients).compile()
    spent = {"products": 0, "scales": 0, "rounding": 0}
    for name, number in re.findall(r'%([a-z_-]+)[.\d]* = .*estimated_cycles":"(\d+)"', program.as_text() or ""):
        kind = "scales" if "abs" in name or "maximum" in name else "rounding" if "round" in name else "products"
        spent[kind] += int(number)
    return spent


def main() -> None:
    rows = [
        "# Products of int8 and of bfloat16 on TPUs",
        "",
        f"Written by `python benchmarks/int8_products.py`: cycles that libtpu {version('libtpu')} estimates for the",
        f"products of a layer of Llama 3 8B and {TOKENS:,} tokens, forward and for gradients of activations, in",
        "millions. Gradients of weights stay in bfloat16, and aren't counted. Compiled, not run.",
        "",
        "| TPU | bfloat16 | int8: products | scales | rounding | int8 / bfloat16 |",
        "|---|---|---|---|---|---|",
    ]
    for topology in SLICES:
        plain, eight = sum(cycles(topology, in_bfloat16).values()), cycles(topology, in_int8)
        parts = " | ".join(f"{number / 1e6:.1f}" for number in eight.values())
        rows.append(
            f"| {topology.partition(':')[0]} | {plain / 1e6:.1f} | {parts} | {sum(eight.values()) / plain:.2f} |"
        )
        print(rows[-1], flush=True)
    RESULT.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
