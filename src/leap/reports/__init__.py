"""Reports: tables, Markdown, plots, the files they are written to, and how far long work is.

One of each, for every bench and task. Nothing here knows what was measured or trained.
"""
