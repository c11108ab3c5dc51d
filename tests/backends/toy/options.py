"""What the toy engine does with each option: it takes what leaves one process as it is, and refuses the rest."""

from portable_fsdp.backends.options import EngineOptions, Package
from portable_fsdp.config import rules
from portable_fsdp.config.describe import option_names, value_of, yaml_value
from portable_fsdp.config.rules import Deployment, Rule
from portable_fsdp.config.schema import Config

_SAID = {option for effect in rules.effects(rules.EFFECTS) for option in effect.options}  # of every engine
_OWN = tuple(option for option in option_names() if option not in _SAID and not option.startswith("xla_fsdp1."))
_TAKEN = (
    "run.peer_timeout_s",
    "sharding.strategy",
    "sharding.wrap",
    "sharding.wrap_modules",
    "precision.compute",
    "precision.matmul",
)


def _default(option: str) -> object:
    section, _, key = option.partition(".")
    return type(getattr(Config.model_construct(), section)).model_fields[key].default


def _refused(option: str) -> Rule:
    def when(config: Config, place: Deployment) -> bool:
        return value_of(config, option) != _default(option)

    return Rule(option, "on toy", when, "one process runs it eagerly", (f"{option}={yaml_value(_default(option))}",))


OPTIONS = EngineOptions(
    name="toy",
    engine="toy.engine:ToyBackend",
    packages={"cpu": Package("torch", "pip install torch")},
    made_for=(),
    example_device="cpu",
    rules=tuple(
        _refused(option) for option in _OWN if option not in _TAKEN and option.startswith(("s", "p", "me", "c"))
    ),
    effects=dict.fromkeys(_OWN, "as it is"),
    processes=lambda device, requested, count: 1,
    launcher_counts_devices=True,
)
