"""What to start and how to load it: the scenario, its file read with all mistakes at once, its cells."""
