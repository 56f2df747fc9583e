"""Text in, token rows out: sources, tokenizers, the token cache, the loader and its data module."""
