"""The page: write, explain, interpret and compare in a browser, on this machine alone.

`leap.app.config` has its settings, `leap.app.page` puts it together, and each tab has a module with
what it does (functions of models and text) and how it looks (gradio).
"""
