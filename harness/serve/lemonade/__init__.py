"""Lemonade Server: what it refuses, how its model is brought up, and what becomes of it under load.

Facts are those of Lemonade's sources and of a server built from them, v11.7.0 and the commits after it;
docs/lemonade.md tells them with their sources.
"""
