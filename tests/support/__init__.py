"""What tests share: MPI programs, the virtual job, the test cluster, plans made by hand."""
