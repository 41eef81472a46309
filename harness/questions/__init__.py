"""A room for each question: a folder, or a file where it is short. `joint.py` is what all of them do together."""
