"""The lorad engine: token ids and adapter revisions in, token ids out.

It knows no names, no HTTP, no database and no text, and imports nothing of `lorad`.  Importing
this package does nothing; torch is loaded only by the modules that compute.
"""
