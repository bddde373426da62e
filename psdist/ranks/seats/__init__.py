"""Where a rank sits: the plan that all ranks agree on and its cores, its network card, its GPU.

psdist.topology decides which seat is good.
"""
