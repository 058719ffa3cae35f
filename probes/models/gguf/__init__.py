"""GGUF files: read within bounds, checked, and converted to a folder in the format of transformers."""
