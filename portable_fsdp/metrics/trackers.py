"""The experiment trackers that accelerate knows, and what each needs. Imports none of them."""

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


def require_installed(names: Iterable[str]) -> None:
    """Raises ConfigError for trackers whose package isn't installed."""
    missing = [name for name in names if not any(map(_is_installed, PACKAGES[name]))]
    if missing:
        packages = " ".join(PACKAGES[name][0] for name in missing)
        raise ConfigError(
            f"observe.trackers: {', '.join(missing)}: not installed: pip install {packages}\n"
            "  or leave it out; `python -m portable_fsdp.report RUN --track=NAME` sends a run's metrics later."
        )


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
