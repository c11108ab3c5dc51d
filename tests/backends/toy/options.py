"""What the toy engine does with each option: it takes what leaves one process as it is, and refuses the rest."""

from portable_fsdp.backends.options import EngineOptions, Package
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.rules import EFFECTS, Refused, effects

_SHARED = {option for effect in effects(EFFECTS) for option in effect.options}  # by every engine
_OWN = tuple(option for option in option_names() if option not in _SHARED and not option.startswith("xla_fsdp1."))
_TAKEN = ["sharding.strategy", "sharding.wrap", "sharding.wrap_modules", "precision.compute", "precision.matmul"]
_REFUSED = [option for option in _OWN if option not in _TAKEN and option.startswith(("s", "p", "me", "c"))]

OPTIONS = EngineOptions(
    engine="toy.engine:ToyBackend",
    packages={"cpu": Package("torch", "pip install torch")},
    example_device="cpu",
    rules=tuple(Refused(option, "on toy", "one process runs it eagerly") for option in _REFUSED),
    effects=dict.fromkeys(_OWN, "as it is"),
    processes=lambda device, requested, count: 1,
    launcher_counts_devices=True,
)
