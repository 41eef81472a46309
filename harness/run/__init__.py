"""Serve, drive and record: the orchestrator, the Locust process, and the progress display."""
