"""`python -m portable_fsdp.doctor`: what this host has, what is wrong with it, and how to fix it.

`checks.py` imports the standard library and `runtime` alone, so that the doctor reports missing packages. A child
process with a time limit opens each engine, so that a driver that hangs is one line of the report.
"""
