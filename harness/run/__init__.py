"""Serve, drive and record: the one orchestrator, Locust as a process of its own, and what is seen meanwhile."""
