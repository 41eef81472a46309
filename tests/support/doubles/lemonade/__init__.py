"""A double of Lemonade Server: its HTTP contract as recorded, with the embedded engine as its backend.

It computes no model. Bodies in recorded/ are those of a real server (v11.7.0 and the commits after it); README.md says
which parts of the contract are kept.
"""
