"""Sparse embedding tables: rows by 64-bit id, made on first touch, held by the ranks together.

id_map, slab, slots, held, update_rules, hashing and table know no ranks; sharded, over an exchange, spreads a table
over them. files takes a table through checkpoints; lookup is the table of a finished model.
"""
