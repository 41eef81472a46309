"""What neighbours write, read as runs: docs/imports.md says what each field becomes and which definitions differ."""
