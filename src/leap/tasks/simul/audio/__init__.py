"""Sound in files and from a microphone, its frames, and its pauses."""
