"""Models as ONNX graphs with a manifest, for `leap.runtime` and others to run without torch."""
