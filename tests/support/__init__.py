"""Shared by tests: MPI programs, the virtual job, the test cluster, plans made manually."""
