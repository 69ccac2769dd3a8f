"""What runs on a host: the agent, its fork server, the rank."""
