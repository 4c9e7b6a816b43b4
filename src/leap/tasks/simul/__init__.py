"""Simultaneous translation: text or speech into text, while the source is still arriving."""
