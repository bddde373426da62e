"""The rules on values: what workers used and pushed, and what servers applied."""
