"""The experiment trackers that accelerate knows, with the package of each. Imports none of them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from portable_fsdp.runtime.errors import ConfigError

PACKAGES = {
    "aim": ("aim",),
    "clearml": ("clearml",),
    "comet_ml": ("comet-ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""Names as accelerate has them -> distributions, one of which must be installed; the first is the one to install."""


def require_installed(names: Iterable[str], key: str, way_out: str) -> None:
    """Raises ConfigError for trackers whose package isn't installed. `key` named them; `way_out` does without them."""
    missing = [name for name in names if not any(map(_is_installed, PACKAGES[name]))]
    if missing:
        packages = " ".join(PACKAGES[name][0] for name in missing)
        raise ConfigError(f"{key}: {', '.join(missing)}: not installed: pip install {packages}\n  or {way_out}.")


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
