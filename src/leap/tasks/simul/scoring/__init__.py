"""Quality and latency of what was translated, and the tools of others that measure them."""
