"""A server for many users at once, on states of constant size.

protocol    what a model must do to be served: read tokens into rows, join rows, select rows
models      PyTorch models behind it: ours with a `StateCache`, others with a KV cache
exported    exported models behind it, by onnxruntime
engine      continuous batching: users join and leave between steps
app         the HTTP interface, OpenAI's completions protocol, over an engine
translate   translation streams over a WebSocket
config      settings, and the server itself
"""
