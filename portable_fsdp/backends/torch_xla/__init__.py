"""The engines of torch_xla: `spmd` (one process for all devices of a host) and `fsdp1` (one for each device).

`runtime.py` is what both share; read it first. Outside this folder only `plan/tpu_trace.py` imports torch_xla.
"""
