"""The collectives of a group: workers close together that reduce their gradients before they push.

Imports errors and psdist/protocol. Knows nothing of servers, chunks' clocks or modes.
"""
