"""Options of the TPU compiler: one place for both torch_xla engines and for plans. Imports nothing of them."""

from collections.abc import Mapping

COMPILER_OPTIONS = {
    # Windowed einsum hides gathers in loops of point-to-point copies, which makes them uncountable and costs memory.
    "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    # torch_xla's own, which it adds where it sees chips (torch_xla/__init__.py, _setup_libtpu_flags): a plan sees none.
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
"""Options of the TPU compiler, the same in a run and in a plan."""

COMPILER_OPTIONS_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}
"""What torch_xla adds to them on v5e and v5p."""


def libtpu_arguments(environ: Mapping[str, str], generation: str = "") -> str:
    """LIBTPU_INIT_ARGS as a run and a plan have it: what the user set there, then ours that aren't among it.

    Args:
        environ: where the user's own are.
        generation: of the chip a plan is for (`v5p`); a run leaves it out, torch_xla there knows its chips.
    """
    arguments = environ.get("LIBTPU_INIT_ARGS", "").split()
    given = set(compiler_options(" ".join(arguments)))
    ours = {**COMPILER_OPTIONS, **(COMPILER_OPTIONS_V5 if generation.startswith("v5") else {})}
    return " ".join([*arguments, *(f"--{name}={value}" for name, value in ours.items() if name not in given)])


def compiler_options(arguments: str) -> dict[str, str]:
    """Name -> value of what stands in LIBTPU_INIT_ARGS; a name alone is `true`."""
    pairs = [argument.lstrip("-").partition("=") for argument in arguments.split()]
    return {name: value or "true" for name, _, value in pairs}
