"""Reports on a run. They read its files and change nothing."""
