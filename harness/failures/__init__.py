"""Failures explained: a table of what servers, Docker and APIs say, and what it means."""
