"""Recorded conversations of agents as loads.

conversation.py   the model, the same for all formats
trace_index.py    finds the conversations of a file or folder, and reads each when it is needed
trace_rows.py     decodes untrusted parts of a file and names what is wrong
edge_agentic.py, weka.py, otel.py, tracelab.py, copilot.py    the readers
prefix_reuse.py   how much of each prompt an earlier prompt starts with
turn_tokens.py    the tokens of each turn, and what a prefix cache could have of them
context_fit.py    which steps fit into a server's context
replay_plan.py    when each step is sent
step_messages.py  the messages of a step
trace_totals.py   the sums of a trace, what of it fits, and the places of its conversations for a load
"""
