"""The registrar and its deputy: the machines of both."""
