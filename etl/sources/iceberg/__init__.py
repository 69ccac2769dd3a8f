"""Iceberg tables: one snapshot's files are planned by pyiceberg and read by Spark, each column by its field id."""
