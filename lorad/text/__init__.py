"""Tokenizer, chat template and incremental detokeniser."""
