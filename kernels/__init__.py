"""The Triton kernels, each beside its plain-torch reference; knows no Lightning, no model class.

Shape letters: W workers, B sequences per worker, T tokens, M = B·T, C width, H heads, K head
dimension, F feed-forward width, V vocabulary, D arena row length, P partial results.
"""
