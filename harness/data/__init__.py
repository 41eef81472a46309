"""Texts that ship with the harness: the words of synthetic prompts, and a set to classify."""
