"""Numbers after the run: from the records of a run to a summary, verdicts, capacity and history. Only reads files."""
