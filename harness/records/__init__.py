"""What a run directory holds: the manifest, one record a request, and samples. See docs/run-directory.md."""
