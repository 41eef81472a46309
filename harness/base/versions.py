"""The versions of what is stored: of its form, and of the formulas of its numbers."""

FORMAT_VERSION = 1  # of run.json, summary.json and baseline.json
DEFINITIONS = 2  # version of the formulas of docs/method.md
REDEFINED = {1: ("tpot",)}  # latencies that version 2 defines otherwise, and so on
