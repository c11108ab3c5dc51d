"""accelerate's interface over the library's public names: a script changes one import.

`front.py` has the class, `state.py` what accelerate shares between its objects, `prepare.py` models and optimizers,
`rows.py` loaders. A run of the trainer imports none of them.
"""

import os
import sys


def keep_xla_out() -> None:
    """Let accelerate, imported before or after this, leave XLA alone, which it would choose wherever torch_xla is
    installed: its first device (`set_seed` takes one) would fix their number."""
    os.environ["USE_TORCH_XLA"] = "0"
    if (imports := sys.modules.get("accelerate.utils.imports")) is not None:
        vars(imports)["_torch_xla_available"] = False
        imports.is_torch_xla_available.cache_clear()
