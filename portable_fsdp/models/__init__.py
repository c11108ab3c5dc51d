"""Models: transformers' causal language models, built on the meta device and made to return a loss.

May import `config` and `runtime`; knows nothing of processes, devices or engines. Read `build.py` first, then
`weights.py` (where weights come from), then the three things we change: `attention.py`, `loss.py` and `wrap.py`.
"""
