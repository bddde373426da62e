"""The collectives of a group: workers close together that reduce their gradients before they push.

``channel`` is the seam; ``process_group`` (torch.distributed), ``virtual`` and ``alone`` implement
it. Imports errors and psdist/protocol, and ``virtual`` the virtual network too. Knows nothing of
servers, chunks' clocks or modes.
"""
