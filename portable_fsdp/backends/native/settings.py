"""Settings of the whole process that an engine changes while it is open: torch has no narrower place for them."""

import os
import tempfile
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.files import cache_folder

MATMUL = {"highest": "highest", "high": "high", "default": "medium"}  # torch's names
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def process_settings(config: Config, device: torch.device) -> ExitStack:
    """Set what `config` says of float32 products, torch.compile and kernels, until the result is closed."""
    settings = ExitStack()
    settings.callback(_set_matmul_precision, _set_matmul_precision(MATMUL[config.precision.matmul]))
    if config.compile.enabled:
        settings.enter_context(_compiler_settings(config))
    if device.type == "cuda":
        settings.enter_context(_kernel_order(torch.cuda.get_device_capability(device)))
    settings.callback(_forget_layouts)
    return settings


def _set_matmul_precision(precision: str) -> str:
    """Set torch's float32 matmul precision; return the previous one."""
    with warnings.catch_warnings():
        # torch 2.9 names a newer setting, which inductor of 2.9 can't read; this one holds for every torch since.
        warnings.filterwarnings(
            "ignore", message="Please use the new API settings to control TF32", category=UserWarning
        )
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
    return before


def _compiler_settings(config: Config) -> ExitStack:
    """Set torch.compile's options, until the result is closed."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    settings, chosen = ExitStack(), compile_cache(config)
    if chosen or INDUCTOR_CACHE not in os.environ:
        folder = chosen or cache_folder(os.environ) / "inductor"
        before = {name: value for name, value in os.environ.items() if name == INDUCTOR_CACHE}
        os.environ[INDUCTOR_CACHE] = str(folder)
        settings.callback(lambda: (os.environ.pop(INDUCTOR_CACHE, None), os.environ.update(before)))
    # A layer has a program for each shape of a batch and the loss two, each in training and in evaluation.
    limit = max(dynamo.recompile_limit, 4 * config.data.shapes)
    settings.enter_context(cast(Any, dynamo).patch(recompile_limit=limit))
    if config.memory.gradient_checkpointing == "budget":
        settings.enter_context(cast(Any, functorch).patch(activation_memory_budget=config.memory.budget))
    settings.callback(torch.compiler.reset)  # else programs of these layers count toward the limit of the next engine's
    return settings


# GPUs on which cuDNN's attention takes less time than torch's first choice, flash attention 2. Training shapes on H100:
# 1.7 to 2.3 times as fast; on A100 0.82, A10G 0.93, L40S 1.00, RTX PRO 6000 0.88 (github.com/huggingface/transformers,
# pull 48163). B200: 1.24 to 1.98 times flash attention 4 (github.com/sgl-project/sglang, pull 33655).
_CUDNN_FIRST = ((9, 0), (10, 0))


def _kernel_order(capability: tuple[int, int]) -> AbstractContextManager[object]:
    """Context in which torch tries attention kernels in the order of their speed on a GPU of this capability."""
    if capability not in _CUDNN_FIRST:
        return nullcontext()  # torch's order
    from torch.nn.attention import SDPBackend, sdpa_kernel

    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, flash, efficient, SDPBackend.MATH], set_priority=True)


def compile_cache(config: Config) -> Path | None:
    """Create `compile.cache_dir`, if it is set. Raises BackendError now; inductor would fail in the first step."""
    if config.compile.cache_dir is None:
        return None
    folder = Path(config.compile.cache_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BackendError(
            f"compile.cache_dir: can't write into the folder {folder}: {error.strerror}.\n"
            "  Name another folder, or set compile.cache_dir=null."
        ) from error
    return folder


def _forget_layouts() -> None:
    """Clear DTensor's cache of layouts: an equal mesh, opened later, would get one whose groups are destroyed."""
    cast(Any, DTensor)._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(cast(Any, torch)._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()  # newer torch
