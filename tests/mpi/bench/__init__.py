"""`psdist bench`, over MPI."""
