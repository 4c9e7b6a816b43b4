"""Commands that explain what other tasks have trained."""
