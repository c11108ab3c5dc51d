"""What the toy engine does with each option: it takes what its few lines do, and refuses the rest."""

from portable_fsdp.backends.options import EngineOptions, Package
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.rules import Refused

_SHARDING = "strategy replicas wrap wrap_classes wrap_modules"
_PRECISION = "master frozen compute output buffers matmul loss_scale loss_scale_window"
_TAKEN = [*(f"sharding.{key}" for key in _SHARDING.split()), *(f"precision.{key}" for key in _PRECISION.split())]
_ASKED = ("sharding.", "precision.", "memory.", "compile.")
_REFUSED = [option for option in option_names() if option not in _TAKEN and option.startswith(_ASKED)]

OPTIONS = EngineOptions(
    engine="toy.engine:ToyBackend",
    packages={"cpu": Package("torch", "pip install torch")},
    example_device="cpu",
    rules=tuple(Refused(option, "on toy", "one process runs it eagerly") for option in _REFUSED),
    processes=lambda device, requested, count: 1,
    launcher_counts_devices=True,
)
