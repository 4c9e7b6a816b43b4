"""The kernels. Importing any of them imports Triton, so ops do it when they are first called."""
