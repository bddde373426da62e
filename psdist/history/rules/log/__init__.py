"""The rules on the log of each server, and the replay that they read."""
