"""What worker processes have imported when they begin: they are forked from a process that has imported this.

Else each would read the 3,400 modules of torch, transformers and a run, for ten seconds. No thread may run here: a fork
has no other than its own.
"""

import os

import jobs
import torch
from cases import Case

torch.set_num_threads(1)
jobs.import_model(Case())
assert len(os.listdir("/proc/self/task")) == 1
