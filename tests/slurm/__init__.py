"""On the Slurm test cluster: four hosts in two racks on one machine."""
