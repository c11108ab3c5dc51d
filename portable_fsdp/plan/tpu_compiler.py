"""The TPU compiler in a process of its own: `python -m portable_fsdp.plan.tpu_compiler PARENT FOLDER`.

Compiles FOLDER/program.hlo.pb for the slice that FOLDER/program.json names; the compiler writes its programs to
FOLDER/dump. The caller (`plan.tpu.compile_for`) sets LIBTPU_INIT_ARGS, and ends this process as soon as it has the text
that it needs. Uses jax's client for absent devices: no TPU, no torch.
"""

# jax has no public way from an HLO module to libtpu, and its bridge isn't typed: written for the jax 0.7.1 and
# libtpu 0.0.21 that torch_xla 2.9.0 pins.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportArgumentType=false

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from portable_fsdp.runtime.process import end_with_parent

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # jax itself must not look for chips
    "TPU_SKIP_MDS_QUERY": "1",  # nor ask a cloud's metadata server who we are
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two compilations at once stop at a lock file
}


def main(folder: Path) -> None:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    request: dict[str, Any] = json.loads((folder / "program.json").read_text())
    devices = devices_of(request["topology"], request["slices"])
    if len(devices) != request["devices"]:
        raise ValueError(f"it has {len(devices)} devices, the program is for {request['devices']}")
    with mlir.make_ir_context(), ir.Location.unknown():
        module = _annotated((folder / "program.hlo.pb").read_bytes(), request)
        _compile(mlir.module_to_bytecode(module), devices, {**request["options"], "xla_dump_to": str(folder / "dump")})


def devices_of(topology: str, slices: int = 1) -> list[Any]:
    """By their ids, as torch_xla's runtime numbers them (pjrt_computation_client.cpp sorts them): x runs fastest."""
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # a chip's two cores as one device: TPU_MEGACORE of a run
    if set(topology.partition(":")[2].split("x")) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)  # one chip, of a host that has more
    if slices > 1:
        options["num_slices"] = slices
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    return sorted(devices, key=lambda device: device.id)


def _annotated(hlo: bytes, request: dict[str, Any]) -> Any:
    """The program with what an HLO module leaves out: shardings of arguments and results, and what is donated."""
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    module = ir.Module.parse(text)
    number = ir.IntegerType.get_signless(32)
    main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    arguments: list[Any] = []
    for argument in request["arguments"]:
        attributes = {"mhlo.sharding": ir.StringAttr.get(argument["sharding"])}
        if argument["output"] is not None:
            attributes["tf.aliasing_output"] = ir.IntegerAttr.get(number, argument["output"])
        arguments.append(ir.DictAttr.get(attributes))
    results = [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(sharding)}) for sharding in request["outputs"]]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
    main.attributes["res_attrs"] = ir.ArrayAttr.get(results)
    module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(number, request["devices"])
    module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(number, 1)
    module.operation.verify()
    return module


def _compile(program: bytes, devices: list[Any], options: dict[str, str]) -> None:
    from jax._src import compiler
    from jax._src.lib import xla_client

    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides=options,
    )
    compile_options.executable_build_options.use_spmd_partitioning = True
    compile_options.executable_build_options.use_shardy_partitioner = False
    devices[0].client.compile(program, xla_client.DeviceList(tuple(devices)), compile_options)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.environ.update(ENVIRONMENT)  # before jax is imported
    main(Path(sys.argv[2]))
