"""Second copies of shards: the machines of both sides, and of the coordinator."""
