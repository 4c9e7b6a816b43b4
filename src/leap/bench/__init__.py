"""Speed and memory, measured the same way for every attention."""
