"""What state machines, memory and records cost as groups and chunks become many."""
