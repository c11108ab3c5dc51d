"""portable_fsdp: train PyTorch causal language models on GPUs and TPUs with one config and one checkpoint.

Read first: `train/loop.py` (a run, top to bottom), `backends/base.py` (what an engine must do), `config/schema.py`.
"""

__version__ = "0.1.0"
