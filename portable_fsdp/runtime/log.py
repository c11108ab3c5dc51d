"""The log of a run, on stderr: all of process 0, and the warnings of the others with their number.

Modules write to `logging.getLogger("portable_fsdp")`; nothing is set up before `configure`.
"""

import logging

LOGGER_NAME = "portable_fsdp"


def configure(process_index: int) -> None:
    """Send the log to stderr as plain lines. A second call replaces what the first one set up."""
    handler = logging.StreamHandler()
    prefix = "" if process_index == 0 else f"[process {process_index}] "
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if process_index == 0 else logging.WARNING)
    logger.propagate = False  # a root handler (absl's, which jax brings) would print every line a second time
