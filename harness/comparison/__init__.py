"""Runs against runs."""
