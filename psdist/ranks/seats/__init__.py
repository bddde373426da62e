"""Where a rank sits: the plan that all ranks agree on and its cores, its network card, its GPU.

What a good seat is, psdist.topology decides.
"""
