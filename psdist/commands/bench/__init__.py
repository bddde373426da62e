"""``psdist bench``: what an exchange costs, beside the limit measured in the same run.

One module per benchmark. Each runs the real servers and workers on the ranks of its job and prints
medians with their spread; nothing in a training run imports this room.
"""
