"""Programs of which ranks are killed."""
