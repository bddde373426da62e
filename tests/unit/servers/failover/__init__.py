"""The coordinator and its standby: the machines of both."""
