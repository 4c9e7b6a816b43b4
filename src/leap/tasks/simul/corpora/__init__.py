"""Sentences with their translations: a reader per corpus or file format, and sound for text."""
