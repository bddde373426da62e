"""Which samples a worker sees in an epoch, and the loader that brings them. Knows no network.

``orders`` numbers the passes, and so gives each an order of its own.
"""
