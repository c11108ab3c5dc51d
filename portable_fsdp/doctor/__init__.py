"""`python -m portable_fsdp.doctor`: what this host has, what is wrong with it, and how to fix it.

`checks.py` imports the standard library and `runtime` alone, so that the doctor reports missing packages. `engines.py`
opens each engine in a child process with a time limit, so that a driver that hangs is one line of the report.
"""
