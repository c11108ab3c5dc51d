"""The families of hostile inputs. A family is a function `case(seed, folder)`: it writes input number `seed` into
`folder` and returns the call that reads it, as a user's command would. The same seed gives the same input.
"""

from collections.abc import Callable
from pathlib import Path

import hostile_heartbeats
import hostile_jsonlines
import hostile_manifests
import hostile_pickles
import hostile_safetensors
import hostile_yamls

Case = Callable[[int, Path], Callable[[], object]]

FAMILIES: dict[str, Case] = {
    "yamls": hostile_yamls.case,
    "pickles": hostile_pickles.case,
    "safetensors": hostile_safetensors.case,
    "heartbeats": hostile_heartbeats.case,
    "jsonlines": hostile_jsonlines.case,
    "manifests": hostile_manifests.case,
}
