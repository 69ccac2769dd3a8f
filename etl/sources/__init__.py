"""Raw tables: a pinned, fingerprinted snapshot of each (`snapshot`), and the DataFrame read from it (`read`)."""
