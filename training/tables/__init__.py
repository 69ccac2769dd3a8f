"""Sparse embedding tables: rows by 64-bit id, made on first touch, held by the ranks together.

id_map, slab, update_rules, hashing and table know no ranks; sharded, over an exchange, spreads a table over them.
embedding is the module that a model has; stored is the table of a finished model, as files.
"""
