"""What models are for: data, metrics and recipe of each task. Tasks do not know each other."""
