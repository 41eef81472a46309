"""The Compose file of a server: its template, its values, what is checked of it before anything starts."""
