"""What a model attended to, and what its predictions rest on: read off it, measured, shown."""

from leap.explain.attention import Explanation, explain
from leap.explain.importance import importance
from leap.explain.stream import StreamExplainer
from leap.explain.trace import Trace, trace

__all__ = ["Explanation", "StreamExplainer", "Trace", "explain", "importance", "trace"]
