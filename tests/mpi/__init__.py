"""Programs under mpirun and mpiexec: starting, failing, ending, with both MPIs."""
