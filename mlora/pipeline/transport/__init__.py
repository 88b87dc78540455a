"""Messages between stages, plain data between ranks, and the watch over who is still alive."""
