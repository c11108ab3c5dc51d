"""What each engine does with each option: honoured, delegated, or refused with the reason and the way out."""

from portable_fsdp.config.schema import Config


def require_supported(config: Config, *, engine: str, device: str, devices: int, hosts: int) -> None:
    """Raise BackendError with all options that `engine` can't honour on so many devices of so many hosts."""
