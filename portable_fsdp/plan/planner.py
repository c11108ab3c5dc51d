"""A config and a target to a plan: memory and work from the engine's own planner, then the bounds of time."""

import importlib.metadata
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, NamedTuple, cast

from portable_fsdp.config.load import check_batch
from portable_fsdp.config.schema import Config
from portable_fsdp.config.support import require_supported
from portable_fsdp.plan.hardware import Target
from portable_fsdp.plan.result import Memory, Plan, Work
from portable_fsdp.plan.time import bound
from portable_fsdp.plan.tpu import plan_tpu
from portable_fsdp.runtime.errors import BackendError

Progress = Callable[[str], None]
"""Is told what begins, in a few words."""

SETTINGS = (
    *("train.micro_batch", "train.global_batch", "data.seq_len", "sharding.strategy", "memory.gradient_checkpointing"),
    *("memory.cpu_offload", "compile.scan_layers", "precision.compute"),
)
"""Keys on which memory and time depend most."""

CONTEXT_BYTES = 2**29
"""Of a CUDA context with its kernels, by rule: about half a GiB, more with more libraries. Not measured by us."""

ENGINES = {"tpu": "xla", "cuda": "native", "cpu": "native"}


class _Model(NamedTuple):
    """What is asked of a model besides its plan."""

    parameters: int
    flops_per_token: float | None  # None: not every weight meets every token


class _Found(NamedTuple):
    """What an engine's planner gives."""

    model: _Model
    memory: Memory
    work: Work
    method: str  # how the figures came about
    notes: tuple[str, ...]


def make_plan(config: Config, target: Target, progress: Progress = lambda stage: None) -> Plan:
    """Plan one step of `config` on `target`; takes seconds to a minute, and needs none of the hardware.

    What the trainer would refuse there is refused here, by the same checks. Raises ConfigError, BackendError.
    """
    began = time.perf_counter()
    kind = target.hardware.kind
    require_supported(config, engine=ENGINES[kind], device=kind, devices=target.devices, hosts=target.hosts)
    check_batch(config, target.devices)
    found = (_on_tpu if kind == "tpu" else _on_ranks)(config, target, progress)
    model, work = found.model, found.work
    tokens = config.train.global_batch * config.data.seq_len
    per_device = None if model.flops_per_token is None else model.flops_per_token * tokens / target.devices
    return Plan(
        on=target.text,
        hardware=_in_words(target),
        devices=target.devices,
        backend=ENGINES[kind],
        settings={key: _setting(config, key) for key in SETTINGS},
        parameters=model.parameters,
        memory=found.memory,
        work=work,
        time=bound(
            work,
            target,
            tokens_per_step=tokens,
            model_flops_per_device=per_device,
            compute=config.precision.compute,
        ),
        method=found.method,
        notes=found.notes,
        planned_in_s=time.perf_counter() - began,
    )


def _on_tpu(config: Config, target: Target, progress: Progress) -> _Found:
    topology = target.topology
    assert topology is not None
    progress("building the model")
    model = cast(_Model, _apart(_model, config))
    found = plan_tpu(
        config,
        topology,
        target.devices,
        slices=target.slices,
        hosts=target.hosts,
        limit_bytes=_limit(target),
        progress=progress,
    )
    method = f"The trainer's own step, compiled by {found.compiler} for this slice; not run."
    return _Found(model, found.memory, found.work, method, found.notes)


def _on_ranks(config: Config, target: Target, progress: Progress) -> _Found:
    progress("running a step on fake tensors")
    limit = _limit(target)
    link, _ = target.levels[0]
    arguments = (config, target.devices, target.devices_per_host, limit, target.hardware.kind, link)
    model, memory, work = _apart(_model_and_plan, *arguments)
    method = f"The trainer's own step, on fake tensors with torch {importlib.metadata.version('torch')}; not run."
    notes = () if not config.compile.enabled else ("planned as if it ran eagerly: what is compiled keeps less.",)
    return _Found(model, memory, work, method, notes)


def _limit(target: Target) -> int | None:
    """What the step may take: on GPUs without the context, which torch's allocator doesn't see."""
    figure = target.hardware.program_bytes
    context = CONTEXT_BYTES if target.hardware.kind == "cuda" else 0
    return None if figure is None else int(figure.value) - context


def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` in a process of its own: FSDP2, DTensor and torch_xla keep what they were told for good."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool:
            raise BackendError(
                "plan: expected the process that plans to end with a plan, found that it was killed.\n"
                "  Was memory short? A plan takes up to 3 GiB."
            ) from None


def _model(config: Config) -> _Model:
    os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise
    from portable_fsdp.models.build import build_model
    from portable_fsdp.train.records import flops_per_token

    size = build_model(config.model, config.precision, seed=0, seq_len=config.data.seq_len, vocabulary=1).size
    return _Model(size.parameters, flops_per_token(size, config.data.seq_len))


def _model_and_plan(
    config: Config, devices: int, devices_per_host: int, limit_bytes: int | None, device: str, link: str
) -> tuple[_Model, Memory, Work]:
    model = _model(config)
    from portable_fsdp.plan.cuda import plan_memory

    kind = cast(Literal["cuda", "cpu"], device)
    found = plan_memory(config, devices, devices_per_host, limit_bytes=limit_bytes, device=kind, link=link)
    return model, *found


def _setting(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _in_words(target: Target) -> str:
    """`16 chips of TPU v5p on 4 hosts`, `8 x NVIDIA H100 80GB HBM3 on 1 host`."""
    hosts = f"on {target.hosts} host{'s' if target.hosts > 1 else ''}"
    if target.hardware.kind == "cpu":
        return f"{target.devices} processes on the CPU"
    if target.hardware.kind == "cuda":
        return f"{target.devices} x {target.hardware.device_name} {hosts}"
    slices = f" in {target.slices} slices" if target.slices > 1 else ""
    seen = "" if target.devices == target.chips else f", {target.devices} devices"
    return f"{target.chips} chips{seen} of {target.hardware.device_name}{slices} {hosts}"
