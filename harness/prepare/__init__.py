"""Prepare a scenario: check it against templates, environment and machine before anything starts."""
