"""The lorad daemon and its tools: names, files, text and HTTP around the embedded engine."""

__version__ = "0.1.0"
