"""The engines of torch_xla: `spmd` (one process for all devices of a host) and `fsdp1` (one process per device).

Read `runtime.py` first, which both share. Outside this folder only `plan/tpu_trace.py` imports torch_xla.
"""
