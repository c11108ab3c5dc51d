"""Report on a run as one HTML file that opens offline, or as Markdown: `python -m portable_fsdp.report RUN`.

Reads only the files of a run's folder, and imports no torch. Start with `read.py`.
"""
