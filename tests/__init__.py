"""The test suite; a package, so that tests say `from tests.mpirun import run_mpi`."""
