"""What the daemon does, apart from HTTP: adapters, requests, events, snapshots."""
