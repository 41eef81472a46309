"""A scenario made ready to run: checked against templates, environment and machine, before anything is started."""
