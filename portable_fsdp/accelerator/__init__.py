"""accelerate's interface over the library's public names: a script changes one import.

`front.py` has the class, `state.py` what accelerate shares between its objects, `prepare.py` models and optimizers,
`rows.py` loaders. A run of the trainer imports none of them.
"""
