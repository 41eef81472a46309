"""What every other package may use: errors, files, secrets, units, processes, facts of server types."""
