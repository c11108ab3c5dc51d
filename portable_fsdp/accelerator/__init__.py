"""accelerate's interface over the library's public names: a script changes one import.

`front.py` has the class, `state.py` what accelerate shares between its objects, `prepare.py` models and optimizers,
`rows.py` loaders. A run of the trainer imports none of them.
"""

import os

os.environ.setdefault("USE_TORCH_XLA", "0")  # else accelerate's import loads torch_xla, which chooses a device
