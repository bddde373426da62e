"""What an exchange and a training step cost, over the network and on one host."""
