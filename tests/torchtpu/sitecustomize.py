"""Python runs this at its start where the folder is on PYTHONPATH."""

import rig

rig.install()
