"""The same run on several engines or numbers of devices, compared step by step, with a certificate of the result.

A tool: no training run imports it. Each place of `--on` is a separate process (`recorder.py`). Where losses part, the
places run again and record every module's tensors, and `record.py` names the first that differs.
"""
