"""What tests/support/programs/parented.py writes to both of its streams: nothing that a parent
could take for a line, nor for text, but that begins as launchers do."""

OUTPUT = b"-" * 74 + b"\nMPI_ABORT was invoked\npartial \0 \xff" + b"x" * 100_000
