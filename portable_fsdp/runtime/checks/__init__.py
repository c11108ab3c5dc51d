"""What `python -m portable_fsdp.doctor` asks of this host: packages, devices, resources, the other hosts.

Each check is a function that returns a Finding and never raises for what it finds. Nothing here imports torch but the
two `ask_*` modules, which run in child processes with a time limit: a driver that hangs is a line, not a hang.
Read first: `finding.py`, then `host.py`.
"""
