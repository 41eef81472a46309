"""From the records of a run to its summary. Only reads files."""
