"""How does the server serve agents? What a turn costs, and what the replay of a trace showed.

agent_turns.py  each turn of a made task: how much of its context was cached and how much was computed again
replay.py       the answer, the facts and the tables of a replayed trace
"""
