"""The ground floor: errors, exit codes, the frame of a command, who launched this process, stop requests, files, locks.

May import: the standard library, absl and psutil; torch only inside a function.
Read first: `errors.py`.
"""
