"""The samples of each worker in an epoch, and their loaders. Imports controller and errors only.

``orders`` numbers the passes, so that each has its own order of samples.
"""
