"""Folders that turn into adapters: observing, and deciding when one is whole."""
