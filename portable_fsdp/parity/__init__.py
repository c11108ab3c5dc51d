"""Comparison of a run on several engines or device counts, step by step, with a certificate of the result.

A tool: no training run imports it. Each place of `--on` is a separate process (`recorder.py`). If losses diverge, the
places run again and record every module's tensors, and `record.py` finds the first that differs.
"""
