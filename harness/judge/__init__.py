"""What numbers may be called: statistics, verdicts, checks, and which runs are alike."""
