"""What of the script's own belongs to a checkpoint: random numbers, attached objects, its dict of
plain values, what a model has beside trained parameters. Knows no network and no files."""
