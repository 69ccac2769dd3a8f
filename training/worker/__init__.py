"""The processes of a training job, from their configuration to their result: a rank, a parameter server, a replay."""
