"""loractl and lorad on the command line."""
