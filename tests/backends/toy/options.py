"""The toy engine's options: it accepts those that it implements, and refuses the rest."""

from portable_fsdp.backends.open import EngineSpec, Package
from portable_fsdp.backends.refusals import refused
from portable_fsdp.config.describe import option_names

_SHARDING = "strategy replicas wrap wrap_classes wrap_modules"
_PRECISION = "master frozen compute output buffers matmul loss_scale loss_scale_window"
_TAKEN = [*(f"sharding.{key}" for key in _SHARDING.split()), *(f"precision.{key}" for key in _PRECISION.split())]
_ASKED = ("sharding.", "precision.", "memory.", "compile.")
_REFUSED = [option for option in option_names() if option not in _TAKEN and option.startswith(_ASKED)]

SPEC = EngineSpec(
    engine="toy.engine:ToyBackend",
    packages={"cpu": Package("torch", "pip install torch")},
    example_device="cpu",
    rules=(
        *refused(f"{' '.join(_REFUSED)} on toy", "one process runs it eagerly"),
        *refused("optim.name=adafactor|muon on toy", "it takes whole matrices, which are cut along both dimensions"),
    ),
    processes=lambda device, requested, count: 1,
    launcher_counts_devices=True,
)
