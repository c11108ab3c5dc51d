"""Host checks: `python -m portable_fsdp.doctor` reports what this host has, what is wrong, and how to fix it.

`checks.py` imports only the standard library and `runtime`, so the doctor can report missing packages. A child process
with a timeout opens each engine, so a hanging driver is one line of the report.
"""
