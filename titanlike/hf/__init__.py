"""Hugging Face: decoders of transformers as models, and its folders read and written.

Imports core, techniques and formats.
"""
