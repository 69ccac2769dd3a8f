"""Delta tables: one version's files are listed by its log, which deltalake reads, and read by Spark."""
