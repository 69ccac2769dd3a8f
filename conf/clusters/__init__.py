"""Hardware as data: what a cluster is (cluster.py), and the named ones as YAML files, found and read by catalog.py."""
