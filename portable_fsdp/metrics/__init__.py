"""What a run says about itself: rows of metrics.jsonl, events.jsonl, FLOPs and MFU.

May import: config and runtime; never torch.distributed, torch_xla or backends. Nothing here needs torch.
Read first: `flops.py` (peaks with their sources, FLOPs of a model), then `sinks.py` (the files).
"""
