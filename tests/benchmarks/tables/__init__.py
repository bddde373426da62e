"""Embedding tables on the servers: against torchrec and DDP, and how hybrid training learns."""
