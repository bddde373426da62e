"""Training against plain PyTorch: values, in every mode, with groups, saving, odd scripts."""
