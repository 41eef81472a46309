"""The charts of a page, as plotly figures in plain data, and what they read of a run."""
