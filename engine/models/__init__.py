"""The dense decoder families, driven by a ModelSpec read from a Hugging Face folder."""
