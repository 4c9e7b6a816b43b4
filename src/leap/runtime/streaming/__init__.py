"""Translation of a source that is still arriving: when to read, when to write, and what."""
