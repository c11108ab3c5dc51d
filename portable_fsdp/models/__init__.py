"""Models: transformers', or any nn.Module, built on the meta device; causal language models return their loss.

May import `config` and `runtime`; knows nothing of processes, devices or engines. Read `build.py` first, then
`weights.py` (sources of weights), then the three parts that we change: `attention.py`, `loss.py` and `wrap.py`.
"""
