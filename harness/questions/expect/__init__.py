"""Is this speed normal, what does the hardware allow, does it fit? The room of `harness expect`.

command.py  the command
decide.py  reads the question and makes its answer; the bounds are in `harness/hardware/`
page.py    the answer, the bounds by context, users and prompt, and the memory
"""
