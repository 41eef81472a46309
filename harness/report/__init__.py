"""Elements, what prints a list of them, and tables, charts and sentences about numbers. It knows no question."""
