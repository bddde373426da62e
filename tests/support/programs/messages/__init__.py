"""Programs that send messages over the transport, without a training."""
