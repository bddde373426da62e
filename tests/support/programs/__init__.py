"""Programs that tests start under mpirun, and what they share with the tests."""
