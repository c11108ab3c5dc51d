"""The tuner: measures settings on the devices that are here, and writes the fastest.

A tool: no training run imports it. Each candidate trains a few steps in separate processes, as a place of
`parity` does; `search.py` chooses the candidates, `__main__.py` measures and writes.
"""
