"""OpenLineage events of jobs, made of their journals and sent behind MLflow's part."""
