"""What watches a run and can't stop or slow it: callbacks, the console, the run's files, goodput, profiles, trackers.

May import: checkpoint, backends' contract and everything below. Nothing here needs torch to read a run's files.
Read first: `callbacks.py` (what a callback is and what it gets), then `run_files.py`.
"""
