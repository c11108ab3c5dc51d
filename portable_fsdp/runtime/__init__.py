"""The ground floor: errors and exit codes, who launched this process, stop requests, the log, whole files, one
run a folder.

May import: the standard library and psutil; torch only inside a function.
Read first: `errors.py`.
"""
