"""Training scripts whose results are compared, on the virtual network and over MPI."""
