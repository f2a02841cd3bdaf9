"""lorad on Ray Serve: a whole daemon in every replica, and one gateway in front of them."""
