"""Is this speed normal, what does the hardware allow, does it fit? The room of `harness expect`.

command.py  the command
sources.py  reads the model's files, and what this machine is
decide.py  the answer, from the question and what is known; the bounds are in `harness/hardware/`
trace_time.py  the least time of a recorded trace
page.py    the answer, the bounds by context, users and prompt, and the memory
"""
