"""Python runs this at its start where the folder is on PYTHONPATH.

A folder of its own: tests hand the paths of pytest, which has tests/torchtpu, to the programs that they start.
"""

import rig

rig.install()
