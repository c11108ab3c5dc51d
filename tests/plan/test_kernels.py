"""The rule for bytes of tensors on a TPU, against arguments of a program that libtpu compiles."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from portable_fsdp.plan.kernels import tiled_bytes
from portable_fsdp.plan.tpu_compiler import ENVIRONMENT

SHAPES = [
    *[(1,), (129,), (1000,), (1025,), (5000,), (1, 1), (2, 128), (3, 128), (9, 128), (12, 100), (4096, 1), (4096, 64)],
    *[(100, 300), (3, 5, 7), (2, 2048), (2, 2048, 64), (4, 2048, 32, 64), (2, 1, 1, 64), (16, 2, 300), ()],
]
DTYPES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
COMPILE = """
import json, sys
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

shapes, dtypes = json.loads(sys.argv[1])
device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
sharding = SingleDeviceSharding(device)
sizes = {}
for dtype in dtypes:
    for shape in shapes:
        argument = jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
        lowered = jax.jit(lambda a: a + a).trace(argument).lower(lowering_platforms=("tpu",))
        sizes[f"{dtype}{shape}"] = lowered.compile().memory_analysis().argument_size_in_bytes
print(json.dumps(sizes))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu and jax")
def test_tensors_take_what_libtpu_gives_a_programs_arguments() -> None:
    words = json.dumps([SHAPES, list(DTYPES)])
    environment = {**os.environ, **ENVIRONMENT}
    ran = subprocess.run([sys.executable, "-c", COMPILE, words], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    sizes = json.loads(ran.stdout)
    assert sizes == {f"{d}{list(shape)}": tiled_bytes(shape, size) for d, size in DTYPES.items() for shape in SHAPES}


def test_large_tensors_are_not_padded() -> None:
    assert tiled_bytes((4096, 128256), 2) == 2 * 4096 * 128256
    assert tiled_bytes((4096, 64), 2) == 2 * 4096 * 64  # the long dimension comes last
    assert tiled_bytes((0, 5), 4) == 0
