"""kvstore.daemon: the server beside a serving node. Not part of this version yet."""
