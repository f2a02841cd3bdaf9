"""Vectors and scores out of an encoder or a decoder: pooling, heads, and the core that runs
requests for them.

Token ids and adapter revisions in, numbers out.  Importing this package does nothing; what reads
files and cuts token lists (`spec`, `files`, `truncation`) knows no torch.
"""
