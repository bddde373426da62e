"""A Slurm cluster of emulated hosts on this machine: hosts, their network, the cluster itself."""
