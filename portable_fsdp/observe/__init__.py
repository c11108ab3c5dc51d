"""Observers of a run, which can't stop or slow it: callbacks, console, run files, goodput, profiles, trackers.

May import: checkpoint, backends' contract and everything below. Nothing here needs torch to read a run's files.
Read first: `callbacks.py` (the interface of callbacks and their data), then `run_files.py`.
"""
