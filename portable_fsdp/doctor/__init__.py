"""`python -m portable_fsdp.doctor`: what this host has, what is wrong with it, and what mends that.

May import `runtime` only, and no torch: what needs torch runs in `probe.py`, a child process with a time limit, so that
a driver that hangs is a line of the report. A check is a function that returns a `Finding` and never raises for what it
finds. Read first: `finding.py`, then `host.py`.
"""
