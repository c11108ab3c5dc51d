"""The ground floor: errors and exit codes, who launched this process, stop requests, the log, whole files.

May import: the standard library only.
Read first: `errors.py`.
"""
