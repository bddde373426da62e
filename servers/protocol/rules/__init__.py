"""Round rules: when a server turns updates into optimizer steps, and when replies may leave.

``rule`` is the seam. The package imports ``chunks``, membership and actions, and never the state
machine.
"""
