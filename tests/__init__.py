"""The test suite; a package, so that tests say `from tests.support.mpirun import run_mpi`."""
