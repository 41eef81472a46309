"""What numbers may be called: statistics, verdicts, checks, noise floors, and which runs are alike."""
