"""Language modelling: learn from text, measure how well it is foretold, and write more of it."""
