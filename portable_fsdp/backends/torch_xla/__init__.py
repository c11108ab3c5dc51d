"""The engines of torch_xla: `spmd` (one process for all devices of a host) and `fsdp1` (one for each device).

`runtime.py` is what both share; read it first. Nothing outside this folder imports torch_xla.
"""
