"""What a model attended to, read off its attentions, and how to show it."""

from leap.explain.attention import Explanation, explain

__all__ = ["Explanation", "explain"]
