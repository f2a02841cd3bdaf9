"""One op a file; `reference.py` holds the same ops in plain torch and is their specification."""
