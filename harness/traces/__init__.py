"""Traces of real traffic as loads: when each request came and how long it was."""
