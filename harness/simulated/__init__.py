"""An embedded OpenAI-compatible engine that models continuous batching; it computes no model.

Runs alone: `python -m harness.simulated --help`. It imports nothing else of this package.
"""
