"""Which samples a worker sees in an epoch, and the loader that brings them. Knows no network."""
