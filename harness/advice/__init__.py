"""What the hardware allows, and what to do about what a run found."""
