"""A scenario made ready to run: held against templates, environment and machine, before anything is started."""
