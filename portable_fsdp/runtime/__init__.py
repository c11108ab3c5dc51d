"""The lowest layer: errors, exit codes, command lines, detection of the launcher, stop requests, files, locks.

May import: the standard library, absl and psutil; torch only inside a function.
Read first: `errors.py`.
"""
