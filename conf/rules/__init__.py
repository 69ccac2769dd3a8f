"""What does not go together in a recipe. A rule within one block is a validator of its class in conf/blocks.

`recipe`: keys of several blocks; `strategies`: layouts of ranks; `promotion`: gates and drift; `foreseen`: names of
columns that a dataset will have; `dataset`: a recipe and the manifest of its dataset.
"""
